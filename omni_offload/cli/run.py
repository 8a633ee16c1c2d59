"""`omni-offload run`: one picture, and what was moved for it."""

import contextlib
import sys
import time
from pathlib import Path

import attrs
from rich.console import Console

from omni_offload.cli.generate import Outcome, Request, generate
from omni_offload.cli.noise import without_noise
from omni_offload.cli.picture import check_output, default_output, save_png, tile
from omni_offload.cli.places import Kind, choose_place
from omni_offload.cli.problems import InputError, one_line
from omni_offload.cli.progress import PREPARING, shown_wait
from omni_offload.cli.recordings import RecordingFiles
from omni_offload.cli.show import Summary
from omni_offload.cli.targets import make_job
from omni_offload.config import make_config, parse_bytes
from omni_offload.errors import OffloadError
from omni_offload.trace import Recording

__all__ = ["run_target"]


def run_target(  # noqa: PLR0913  (options of a command line)
    target: str,
    *,
    prompt: str | None,
    mode: str,
    device: str | None,
    device_memory: str | None,
    capacity: str | None,
    output: Path | None,
    files: RecordingFiles,
    steps: int | None,
    seed: int,
    pin_memory: bool,
    compare: bool,
) -> Summary:
    """Make a picture and write it; the arguments are the command line's.

    Raises:
        InputError: Something that the user can put right.
        OffloadError: The pipeline cannot be offloaded so.
    """
    selector = {"mode": mode, "pin_memory": pin_memory}
    if device_memory is not None:
        selector["device_memory"] = _size("--device-memory", device_memory)
    config = make_config(selector)
    limit = None if capacity is None else _size("--capacity", capacity)
    path = default_output(target, prompt) if output is None else output
    with without_noise(), contextlib.redirect_stdout(sys.stderr):
        console = Console(stderr=True)
        with shown_wait(PREPARING, console):
            job = make_job(target, prompt=prompt, steps=steps, seed=seed)
            check_output(path, make_folder=output is None)
            files.check(path)
            place = choose_place(device)
            if place.kind is Kind.CPU:
                files.refuse_cpu(place.missing)
        start = time.perf_counter()
        outcome = _generate(Request(job=job, place=place, config=config, capacity=limit, compare=compare), files, console)
        save_png(tile(outcome.outputs), path)
        seconds = time.perf_counter() - start
    return Summary(target=target, prompt=prompt, seed=seed, place=place, outcome=outcome, output=path, files=files, seconds=seconds)


def _generate(request: Request, files: RecordingFiles, console: Console) -> Outcome:
    """Run a job, and write what was recorded of it, also where it fails.

    Raises:
        InputError: As `generate`, and where a file cannot be written.
        OffloadError: As `generate`.
    """
    if not files.wanted:
        return generate(request, console)
    written: list[Recording] = []

    def keep(recording: Recording) -> None:
        files.write(recording)
        written.append(recording)

    try:
        return generate(attrs.evolve(request, keep=keep), console)
    except (InputError, OffloadError) as error:
        if not written:
            raise
        places = " and ".join(map(str, files.wanted))
        raise InputError(f"{one_line(error)}; what was recorded until then is in {places}") from error


def _size(option: str, value: str) -> int:
    """Read a size: bytes, or a number with a unit; at least one byte."""
    try:
        size = parse_bytes(int(value) if value.isdecimal() else value)
    except OffloadError as error:
        raise InputError(f"{option}: {error}") from error
    if size < 1:
        raise InputError(f"{option} {value}: give at least one byte")
    return size
