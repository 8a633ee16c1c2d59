"""Where a pipeline runs: the machine's accelerator, else the simulated one, else the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import attrs
import torch

from omni_offload.accelerator import resolve_device, unsupported_reason
from omni_offload.cli.problems import InputError, one_line
from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim

__all__ = ["Kind", "Place", "choose_place", "fewer_threads", "find_accelerator"]

SIM = "sim"

_TINY = 1 << 25
"""Bytes of weights below which one thread is faster than several."""


class Kind(Enum):
    """What kind of device it is."""

    ACCELERATOR = "accelerator"
    SIMULATED = "simulated"
    CPU = "cpu"


@attrs.frozen(kw_only=True)
class Place:
    """A device, and what is missing where it is not the one that was hoped for.

    Attributes:
        device: The device, with its index.
        kind: What it is.
        missing: Why there is nothing to offload from, where it is the CPU; else None.
    """

    device: torch.device
    kind: Kind
    missing: str | None = None


def choose_place(asked: str | None) -> Place:
    """Return the place that was asked for, else the best one there is; the simulated accelerator is built where it is needed.

    Args:
        asked: A device's name, or None.

    Raises:
        InputError: There is no such device, or it cannot be used.
    """
    if asked is not None:
        return _named(asked)
    found = find_accelerator()
    if found is not None and unsupported_reason(found) is None:
        return Place(device=resolve_device(found), kind=Kind.ACCELERATOR)
    try:
        return _simulated(0)
    except OffloadStateError as error:
        reason = one_line(error)
    accelerator = "no accelerator" if found is None else f"none that weights are offloaded from ({found.type})"
    return Place(device=torch.device("cpu"), kind=Kind.CPU, missing=f"this machine has {accelerator}, and {reason}")


def find_accelerator() -> torch.device | None:
    """Return the machine's own accelerator, whatever it is; None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == SIM else found


def _named(asked: str) -> Place:
    kind, _, index = asked.partition(":")
    if kind == SIM:
        if index and (not index.isdecimal() or int(index) >= sim.Settings().devices):
            raise InputError(f"--device {asked}: there are sim:0 to sim:{sim.Settings().devices - 1}")
        try:
            return _simulated(int(index or 0))
        except OffloadStateError as error:
            raise InputError(f"--device {asked}: {error}") from error
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise InputError(f"--device {asked!r} is no device; give cpu, sim, or the machine's accelerator, such as cuda") from error
    if device.type == "cpu":
        return Place(device=torch.device("cpu"), kind=Kind.CPU, missing="the CPU was asked for, and weights are on the host already")
    if (reason := unsupported_reason(device)) is not None:
        raise InputError(f"--device {asked}: {reason}; give cpu or sim")
    return Place(device=resolve_device(device), kind=Kind.ACCELERATOR)


def _simulated(index: int) -> Place:
    if (reason := sim.why_unavailable()) is not None:
        raise OffloadStateError(reason)
    sim.install()
    return Place(device=torch.device(SIM, index), kind=Kind.SIMULATED)


@contextmanager
def fewer_threads(weight_bytes: int) -> Iterator[None]:
    """Run a tiny pipeline on one thread of the host: waking others takes longer than its kernels do."""
    before = torch.get_num_threads()
    if weight_bytes < _TINY:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
