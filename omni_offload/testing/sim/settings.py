"""What the software accelerator is like: its mode, its sizes, its speeds, its failures."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import attrs

from omni_offload.errors import OffloadConfigError
from omni_offload.testing.sim.library import library

__all__ = ["Settings", "configure", "current_settings", "settings"]

MODES = ("threads", "virtual")
RACES = ("off", "record", "raise")
MAX_DEVICES = 8


@attrs.frozen(kw_only=True)
class Settings:
    """All settings, with the values that hold until `configure` changes them.

    Attributes:
        mode: "virtual": nothing sleeps, operations advance virtual clocks, and times are exact and repeatable.
            "threads": streams are threads, copies take wall time and land late, so that a missing wait reads what was
            there before.
        races: "off", "record" (see `races()`), or "raise" a `RuntimeError` at the second of two unordered operations.
        poison: Fill fresh device and pinned memory with 0xFF bytes: NaN in every floating type.
        devices: How many devices there are, 1 to 8.
        capacity: Bytes a device; 0: unlimited. Beyond it `torch.OutOfMemoryError`.
        pinned_capacity: Bytes of pinned and registered host memory; 0: unlimited. Beyond it `RuntimeError`.
        h2d_gbps: Host to device, in 10^9 bytes/s; 0: unlimited. Each device has one copy engine a direction.
        d2h_gbps: Device to host, as `h2d_gbps`.
        copy_latency: Seconds added to every copy.
        launch: Host seconds for every queued operation, virtual mode only.
        flops: FLOP/s of a device, virtual mode only; 0: unlimited. A kernel takes the longer of arithmetic and memory.
        memory_gbps: Device memory, in 10^9 bytes/s, virtual mode only; 0: unlimited.
        collective_gbps: The link to the other ranks, in 10^9 bytes/s; 0: unlimited. Each device has one engine for collectives, which
            run beside copies and kernels. Of W ranks an all-gather, a reduce-scatter and an all-to-all take (W - 1) / W of
            the whole, an all-reduce twice that, a scatter and a gather W - 1 pieces, all others what they carry, once.
        collective_latency: Seconds added to every collective of more than one rank.
        fail_alloc_in: So many device allocations succeed, the next one raises `torch.OutOfMemoryError`, once: 0 fails
            the very next one. Negative: off.
        fail_pin_in: As `fail_alloc_in`, for pinning and registering host memory, with a `RuntimeError`.
    """

    mode: str = "virtual"
    races: str = "record"
    poison: bool = True
    devices: int = 2
    capacity: int = 0
    pinned_capacity: int = 0
    h2d_gbps: float = 0.0
    d2h_gbps: float = 0.0
    copy_latency: float = 0.0
    launch: float = 5e-6
    flops: float = 1e14
    memory_gbps: float = 1000.0
    collective_gbps: float = 0.0
    collective_latency: float = 0.0
    fail_alloc_in: int = -1
    fail_pin_in: int = -1


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_size(value: object) -> bool:
    return _is_int(value) and _is_amount(value)


_SIZE = ("bytes as an int, 0 or more", _is_size)
_AMOUNT = ("a finite number, 0 or more", _is_amount)
_COUNTDOWN = ("an int, negative for off", _is_int)
_CHECKS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "mode": (f"one of {MODES}", lambda value: value in MODES),
    "races": (f"one of {RACES}", lambda value: value in RACES),
    "poison": ("a bool", lambda value: isinstance(value, bool)),
    "devices": (f"an int from 1 to {MAX_DEVICES}", lambda value: _is_int(value) and value in range(1, MAX_DEVICES + 1)),
    "capacity": _SIZE,
    "pinned_capacity": _SIZE,
    "h2d_gbps": _AMOUNT,
    "d2h_gbps": _AMOUNT,
    "copy_latency": _AMOUNT,
    "launch": _AMOUNT,
    "flops": _AMOUNT,
    "memory_gbps": _AMOUNT,
    "collective_gbps": _AMOUNT,
    "collective_latency": _AMOUNT,
    "fail_alloc_in": _COUNTDOWN,
    "fail_pin_in": _COUNTDOWN,
}

_current = Settings()


def current_settings() -> Settings:
    """Return the settings that hold now; the two countdowns as far as they have run.

    Raises:
        OffloadStateError: `install` was not called.
    """
    alloc, pin = library().countdowns()
    return attrs.evolve(_current, fail_alloc_in=alloc, fail_pin_in=pin)


def configure(**changes: object) -> None:
    """Change settings for all later operations; None, and a setting left out, stays as it is.

    Clocks go on, no stream is synchronised, and what is queued is not lost; changing `mode` waits until the queues are
    empty.

    Args:
        **changes: The fields of `Settings`.

    Raises:
        OffloadConfigError: An unknown setting or a wrong value; the message names all of them, and nothing was changed.
        OffloadStateError: `install` was not called.
    """
    given = {name: value for name, value in changes.items() if value is not None or name not in _CHECKS}
    check(given)
    _apply(Settings(**{**attrs.asdict(current_settings()), **given}))


@contextlib.contextmanager
def settings(**changes: object) -> Iterator[Settings]:
    """Change settings for the duration of a `with` block and restore the former ones, also after an exception.

    Args:
        **changes: As for `configure`.

    Yields:
        The settings inside the block.

    Raises:
        OffloadConfigError: As `configure`.
        OffloadStateError: As `configure`.
    """
    former = current_settings()
    configure(**changes)
    try:
        yield current_settings()
    finally:
        _apply(former)


def check(given: Mapping[str, object]) -> None:
    """Raise one `OffloadConfigError` that names every unknown setting and every wrong value in `given`."""
    problems = [
        f"{name} must be {_CHECKS[name][0]}, got {value!r}" if name in _CHECKS else f"there is no setting {name!r}"
        for name, value in given.items()
        if name not in _CHECKS or not _CHECKS[name][1](value)
    ]
    if problems:
        raise OffloadConfigError(f"sim settings: {'; '.join(problems)}. Known settings: {', '.join(_CHECKS)}")


def _apply(wanted: Settings) -> None:
    global _current  # noqa: PLW0603  (one accelerator a process)
    library().configure(attrs.asdict(wanted))
    _current = wanted
