"""When a device reached a place of a stream."""

import time

import torch

from omni_offload.accelerator.streams import Accelerator

__all__ = ["DeviceClock"]


class DeviceClock:
    """Tells when a device reached a place of a stream: by timing events, else (where it has none) by the host's clock.

    A moment is noted at once and read later, when the device has done everything. What the host does is noted on a stream on which
    nothing runs, so that it stands on the same scale.

    Attributes:
        problem: Why the device cannot time events; None where it can.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._device = accelerator.device
        self._host = accelerator.idle_stream
        self._began = time.perf_counter()
        self._first: torch.Event | None = None
        self.problem: str | None = None
        try:
            self._first = _timing_event(self._device, self._host)
            self.seconds(self.now())
        except (RuntimeError, TypeError) as error:
            self.problem = f"{self._device} cannot time events ({type(error).__name__}: {error})"

    def at(self, stream: torch.Stream) -> torch.Event | float:
        """Note the moment at which a stream will have done all that is queued on it so far; the host does not block."""
        return _timing_event(self._device, stream) if self.problem is None else time.perf_counter()

    def now(self) -> torch.Event | float:
        """Note what the time is for the host."""
        return self.at(self._host)

    def between(self, first: torch.Event, last: torch.Event) -> float:
        """Return the seconds from one moment to another, both of which have passed."""
        return first.elapsed_time(last) / 1e3

    def seconds(self, moment: torch.Event | float) -> float:
        """Return a moment as seconds since the clock was made; the host waits for it."""
        if self._first is None or isinstance(moment, float):
            return float(moment) - self._began  # type: ignore[arg-type]  # without a first event there are no others
        moment.synchronize()
        return self._first.elapsed_time(moment) / 1e3


def _timing_event(device: torch.device, stream: torch.Stream) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record(stream)
    return event
