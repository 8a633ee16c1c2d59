"""The commands."""

import contextlib
import importlib
import importlib.util
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import pipelines
from omni_offload.cli import BAD_INPUT, PROGRAM
from omni_offload.cli.generate import Request, generate
from omni_offload.cli.picture import check_output, default_output, save_png, tile
from omni_offload.cli.places import choose_place
from omni_offload.cli.problems import InputError, one_line
from omni_offload.cli.progress import shown_wait
from omni_offload.cli.show import Summary, show
from omni_offload.cli.targets import make_job
from omni_offload.config import make_config, parse_bytes
from omni_offload.errors import OffloadError

__all__ = ["app", "run_app"]

_INTERRUPTED = 130
_NOISY = ("diffusers.utils.logging", "transformers.utils.logging")
_ERRORS_ONLY = logging.ERROR
_WIDE = 200  # columns, where no terminal says how many there are

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run diffusion pipelines on accelerators smaller than their weights.",
)

_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")  # typer may bring its own click


def run_app(arguments: Sequence[str]) -> int:
    """Run a command line; what a user can put right ends in one line on standard error and `BAD_INPUT`."""
    try:
        status = app(args=list(arguments), prog_name=PROGRAM, standalone_mode=False)
    except _USAGE_ERROR as error:
        return _refuse(error.format_message() or "no command was given; see --help")
    except (InputError, OffloadError, NotImplementedError) as error:
        return _refuse(error)
    except ModuleNotFoundError as error:
        return _refuse(f"{error.msg}: install the extra that brings it, `pip install 'omni-offload[pipelines]'`")
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    return status if isinstance(status, int) else 0


@app.command(name="pipelines")
def list_pipelines(*, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the registered pipelines."""
    entries = pipelines.registered().values()
    if as_json:
        rows = [{"name": e.name, "class": e.pipeline, "upstream": e.upstream_name, "cases": list(e.cases)} for e in entries]
        _write(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "stands for", "class"):
        table.add_column(column)
    for entry in entries:
        table.add_row(entry.name, entry.upstream_name, entry.pipeline)
    _console().print(table)


@app.command()
def run(  # noqa: PLR0913  (options of a command line)
    target: Annotated[str, typer.Argument(help="A registered pipeline, or a local folder with a saved one.")],
    *,
    prompt: Annotated[str | None, typer.Option(help="What the picture shows.")] = None,
    mode: Annotated[str, typer.Option(help="How weights are moved: module.")] = "module",
    device: Annotated[str | None, typer.Option(help="cpu, sim, or an accelerator such as cuda; left out: the best there is.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Upper bound on weights on the device, such as 12GiB.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Size of the simulated device, such as 2MiB.")] = None,
    output: Annotated[Path | None, typer.Option(help="The PNG; left out: in outputs/.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the noise that the picture starts from.")] = 0,
    no_pin: Annotated[bool, typer.Option("--no-pin", help="Leave host memory pageable.")] = False,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="On a real accelerator: make no resident run to compare with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a picture with offloaded weights, and show what was moved."""
    selector = {"mode": mode, "pin_memory": not no_pin}
    if device_memory is not None:
        selector["device_memory"] = _size("--device-memory", device_memory)
    config = make_config(selector)
    limit = None if capacity is None else _size("--capacity", capacity)
    path = default_output(target, prompt) if output is None else output
    with _quiet(), contextlib.redirect_stdout(sys.stderr):
        console = Console(stderr=True)
        with shown_wait("preparing (the first time builds the simulated accelerator: 20 s)", console):
            job = make_job(target, prompt=prompt, steps=steps, seed=seed)
            check_output(path, make_folder=output is None)
            place = choose_place(device)
        start = time.perf_counter()
        request = Request(job=job, place=place, config=config, capacity=limit, compare=not no_compare)
        outcome = generate(request, console)
        save_png(tile(outcome.outputs), path)
        seconds = time.perf_counter() - start
    summary = Summary(target=target, prompt=prompt, seed=seed, place=place, outcome=outcome, output=path, seconds=seconds)
    if as_json:
        _write(summary.to_json())
    else:
        show(summary, _console())


def _size(option: str, value: str) -> int:
    """Read a size: bytes, or a number with a unit; at least one byte."""
    try:
        size = parse_bytes(int(value) if value.isdecimal() else value)
    except OffloadError as error:
        raise InputError(f"{option}: {error}") from error
    if size < 1:
        raise InputError(f"{option} {value}: give at least one byte")
    return size


def _refuse(error: BaseException | str) -> int:
    sys.stderr.write(f"{PROGRAM}: {one_line(error)}\n")
    return BAD_INPUT


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what libraries log below an error, their bars where there is no terminal, and warnings about their own future."""
    logs = [importlib.import_module(name) for name in _NOISY if importlib.util.find_spec(name.partition(".")[0])]
    levels = [log.get_verbosity() for log in logs]
    barred = [log for log in logs if log.is_progress_bar_enabled() and not sys.stderr.isatty()]
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        for log in logs:
            log.set_verbosity(_ERRORS_ONLY)
        for log in barred:
            log.disable_progress_bar()
        try:
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.set_verbosity(level)
            for log in barred:
                log.enable_progress_bar()
