"""What the software accelerator recorded: bytes, time, races, a timeline."""

import contextlib
from collections.abc import Iterator

import attrs
import torch

from omni_offload.testing.sim.library import PINNED, RaceRow, SpanRow, device_index, library

__all__ = [
    "Race",
    "Span",
    "allocated",
    "allocation_count",
    "clock",
    "d2h_bytes",
    "h2d_bytes",
    "host_work",
    "peak",
    "pinned_bytes",
    "pinned_peak",
    "races",
    "reset_counters",
    "reset_peak",
    "reset_races",
    "spin",
    "trace",
]

Device = torch.device | str | int | None


@attrs.frozen(kw_only=True)
class Race:
    """Two operations on the same bytes that nothing orders.

    Attributes:
        message: The whole finding in one sentence.
        kind: "write-then-read", "read-then-write", "write-then-write", "reuse-after-free" or "unregister-in-use".
        first: The earlier operation, as issued: "H2D copy", "aten::mm", ...
        first_on: Where it ran: "sim:0 default stream", "sim:0 stream 3", "sim:0 collective stream" or "host".
        second: The later operation.
        second_on: Where that one ran.
        device: Index of the device whose memory it is; None for pinned host memory.
        nbytes: Size of the memory block.
        start: First byte of the block that both touch.
        end: One past the last.
    """

    message: str
    kind: str
    first: str
    first_on: str
    second: str
    second_on: str
    device: int | None
    nbytes: int
    start: int
    end: int

    def __str__(self) -> str:
        return self.message


@attrs.frozen(kw_only=True)
class Span:
    """One operation on the timeline.

    Attributes:
        what: "H2D copy", "D2H copy", "D2D copy", "spin", or the operator's name ("aten::mm", "c10d::allreduce_").
        device: Index of the device.
        stream: Id of the stream: 0 is the default one, -1 the one that collectives run on.
        start: Seconds, of the same clock as `clock()`.
        end: Seconds.
        bytes: Payload of a copy; all bytes that an operator's arguments and results span.
    """

    what: str
    device: int
    stream: int
    start: float
    end: float
    bytes: int


def allocated(device: Device = None) -> int:
    """Return the bytes of live tensors on a device, each rounded up to 512 bytes.

    Args:
        device: The device; None: the current one.
    """
    return library().memory(device_index(device))["allocated"]


def peak(device: Device = None) -> int:
    """Return the largest `allocated()` of a device since `reset_peak` or `reset_counters`, in bytes.

    Args:
        device: The device; None: the current one.
    """
    return library().memory(device_index(device))["peak"]


def reset_peak(device: Device = None) -> None:
    """Set the peak of a device to what is allocated there now.

    Args:
        device: The device; None: the current one.
    """
    library().reset_peak(device_index(device))


def allocation_count(device: Device = None) -> int:
    """Return how many allocations a device has served since `reset_counters`.

    The n-th of them is the one that `fail_alloc_in=n` fails, counted from 0, in a program that runs again.

    Args:
        device: The device; None: the current one.
    """
    return library().memory(device_index(device))["count"]


def pinned_bytes() -> int:
    """Return the bytes of pinned and registered host memory, exact sizes."""
    return library().memory(PINNED)["allocated"]


def pinned_peak() -> int:
    """Return the largest `pinned_bytes()` since `reset_counters`."""
    return library().memory(PINNED)["peak"]


def pin_count() -> int:
    """Return how many pinned allocations and registrations there were since `reset_counters`; see `fail_pin_in`."""
    return library().memory(PINNED)["count"]


def h2d_bytes() -> int:
    """Return the payload of all copies from the host to any device since `reset_counters`, in bytes."""
    return library().copied(0)


def d2h_bytes() -> int:
    """Return the payload of all copies from any device to the host since `reset_counters`, in bytes."""
    return library().copied(1)


def reset_counters() -> None:
    """Set byte and allocation counts to 0 and peaks to the present state. Clocks go on: measure time by differences."""
    library().reset_counters()


def clock() -> float:
    """Return the time in seconds: virtual (the latest of the host and all streams), or wall in threads mode.

    Synchronise every device that was used before measuring a difference.
    """
    return library().clock()


def spin(seconds: float) -> None:
    """Queue a stand-in for a kernel on the current stream; the host does not wait for it.

    Args:
        seconds: How long it computes.
    """
    library().spin(seconds)


def host_work(seconds: float) -> None:
    """Let the host be busy: in virtual time, or asleep in threads mode.

    Args:
        seconds: How long.
    """
    library().host_work(seconds)


def races() -> list[Race]:
    """Return the races found since `reset_races`, in the order of their second operations (the first 10,000)."""
    return [_race(row) for row in library().races()]


def reset_races() -> None:
    """Forget the races found, and what freed memory was still in use."""
    library().reset_races()


@contextlib.contextmanager
def trace() -> Iterator[list[Span]]:
    """Record the timeline of a `with` block, which may be nested.

    Yields:
        A list that is filled when the block ends, also by an exception. The host then waits until the queues are empty,
        which orders nothing: a missing wait is still found.
    """
    spans: list[Span] = []
    start = library().start_trace()
    try:
        yield spans
    finally:
        spans.extend(_span(row) for row in library().stop_trace(start))


def _race(row: RaceRow) -> Race:
    message, kind, first, first_on, second, second_on, device, nbytes, start, end = row
    return Race(
        message=message,
        kind=kind,
        first=first,
        first_on=first_on,
        second=second,
        second_on=second_on,
        device=None if device == PINNED else device,
        nbytes=nbytes,
        start=start,
        end=end,
    )


def _span(row: SpanRow) -> Span:
    what, device, stream, start, end, nbytes = row
    return Span(what=what, device=device, stream=stream, start=start, end=end, bytes=nbytes)
