"""The compiled library as Python sees it, and the one copy of it that a process may hold."""

from collections.abc import Mapping
from typing import Protocol, cast

import torch

from omni_offload.errors import OffloadStateError
from omni_offload.testing.sim.build import load_library

__all__ = ["DEVICE_TYPE", "PINNED", "Library", "RaceRow", "SpanRow", "device_index", "library", "load"]

DEVICE_TYPE = "sim"
PINNED = -1  # the index under which the library accounts for pinned host memory

RaceRow = tuple[str, str, str, str, str, str, int, int, int, int]
SpanRow = tuple[str, int, int, float, float, int]


class Library(Protocol):
    """What csrc/sim.cpp exports. Times are in seconds, sizes in bytes; a device is an index, `PINNED` is the host's."""

    def configure(self, settings: Mapping[str, object], /) -> None:
        """Apply every setting."""

    def countdowns(self) -> tuple[int, int]:
        """Return what is left of `fail_alloc_in` and `fail_pin_in`."""

    def memory(self, device: int, /) -> dict[str, int]:
        """Return allocated, peak and count."""

    def reset_peak(self, device: int, /) -> None:
        """Set the peak to what is allocated."""

    def reset_counters(self) -> None:
        """Reset bytes, counts and peaks."""

    def copied(self, direction: int, /) -> int:
        """Return the payload of copies: 0 to the device, 1 to the host, 2 between devices."""

    def clock(self) -> float:
        """Return the time."""

    def races(self) -> list[RaceRow]:
        """Return the races kept."""

    def race_count(self) -> int:
        """Return how many there were."""

    def reset_races(self) -> None:
        """Forget the races and graves."""

    def start_trace(self) -> int:
        """Start a trace and return its position."""

    def stop_trace(self, start: int, /) -> list[SpanRow]:
        """End the trace that started there."""

    def drain(self) -> None:
        """Wait until all queues are empty; orders nothing."""

    def spin(self, seconds: float, /) -> None:
        """Queue a stand-in kernel."""

    def host_work(self, seconds: float, /) -> None:
        """Keep the host busy."""

    def host_register(self, pointer: int, nbytes: int, /) -> None:
        """Pin a range of host memory in place."""

    def host_unregister(self, pointer: int, /) -> None:
        """Unpin the range that starts there."""

    def host_touch(self, pointer: int, nbytes: int, write: bool, what: str, /) -> None:  # noqa: FBT001
        """Note an access of the host."""

    def bad_fork(self) -> bool:
        """Say whether this process was forked from one that used the device."""

    def seed_all(self, seed: int, /) -> None:
        """Seed the generators of all devices."""

    def rng_state(self, device: int, /) -> torch.Tensor:
        """Return the state of a device's generator."""

    def set_rng_state(self, state: torch.Tensor, device: int, /) -> None:
        """Set the state of a device's generator."""

    def set_device(self, device: int, /) -> None:
        """Make a device the thread's current one."""

    def current_device(self) -> int:
        """Return the thread's current device."""

    def device_count(self) -> int:
        """Return how many devices there are."""


_loaded: Library | None = None


def load() -> tuple[Library, bool]:
    """Load the library where this process has not; the flag says whether this call did.

    Raises:
        OffloadStateError: see `load_library`.
    """
    global _loaded  # noqa: PLW0603  (torch allows one such backend a process, for good)
    if _loaded is not None:
        return _loaded, False
    _loaded = cast("Library", load_library())
    return _loaded, True


def library() -> Library:
    """Return the loaded library.

    Raises:
        OffloadStateError: `install` was not called.
    """
    if _loaded is None:
        raise OffloadStateError("the software accelerator is not installed: call omni_offload.testing.sim.install() first")
    return _loaded


def device_index(device: torch.device | str | int | None = None) -> int:
    """Return the index of a sim device; None, and a device without an index, mean the calling thread's current one.

    Raises:
        ValueError: the device is of another type.
    """
    if device is None:
        return library().current_device()
    if isinstance(device, int):
        return device
    asked = torch.device(device)
    if asked.type != DEVICE_TYPE:
        raise ValueError(f"expected a {DEVICE_TYPE} device, got {asked}")
    return library().current_device() if asked.index is None else asked.index
