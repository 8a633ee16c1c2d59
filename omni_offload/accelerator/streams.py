"""A device's streams: copies, computation and collectives, what waits for what, and its memory."""

import functools
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

from omni_offload.accelerator.observer import Observer

__all__ = ["Accelerator"]

_Work = TypeVar("_Work")


class _Waitable(Protocol):
    def wait(self) -> object: ...


class Accelerator:
    """A device that weights are copied to: its copy stream, its events and its memory.

    One object a device (`Accelerator.of`), so that all backends share one copy stream: a device has one copy engine a direction.

    Attributes:
        recorder: What notes copies, waits and uses, while a recording runs; None: nothing is noted, which costs this look.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy_stream = torch.Stream(device)
        self.recorder: Observer | None = None

    @staticmethod
    def of(device: torch.device) -> "Accelerator":
        """Return the process's one object for a device that has an index."""
        return _accelerator(device)

    def current_stream(self) -> torch.Stream:
        """Return the stream that the caller's kernels go to."""
        return torch.accelerator.current_stream(self.device.index)

    @functools.cached_property
    def idle_stream(self) -> torch.Stream:
        """A stream on which nothing runs: what is recorded on it fires at once."""
        return torch.Stream(self.device)

    @functools.cached_property
    def gather_stream(self) -> torch.Stream:
        """The stream that collectives of weights are ordered on: beside copies, and beside the caller's kernels and collectives."""
        return torch.Stream(self.device)

    @functools.cached_property
    def landing_stream(self) -> torch.Stream:
        """The stream that waits for collectives of weights: by then the gather stream may wait for copies of later ones."""
        return torch.Stream(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of device memory (uint8) that belong to the copy stream.

        Freed memory is handed out again in the order of the copy stream, so whoever frees it first lets the copy stream wait for
        the last reader (`after`). The host does not block.

        Raises:
            torch.OutOfMemoryError: As the device's allocator raised it.
        """
        with torch.inference_mode(mode=False), self.copy_stream:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool = True) -> None:
        """Queue a host-to-device copy of bytes on the copy stream; a source that is not pinned blocks the host until it is done."""
        recorder = self.recorder
        if recorder is not None:
            recorder.copy_begins(self.copy_stream, source, blocks=not pinned)
        with self.copy_stream:
            target.copy_(source, non_blocking=True)
        if recorder is not None:
            recorder.copy_ends(self.copy_stream, source)

    def to_host(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy bytes to the host and return them there; the host blocks.

        Args:
            source: The bytes; where they are on the host and no target is given, they are returned themselves.
            target: Where they go; None: to memory of their own.
        """
        recorder = self.recorder if source.device == self.device else None
        if recorder is not None:
            recorder.copy_begins(self.current_stream(), source, blocks=True)
        with torch.inference_mode(mode=False):
            copied = source.cpu() if target is None else target.copy_(source)
        if recorder is not None:
            recorder.copy_ends(self.current_stream(), source)
        return copied

    def record_copies(self) -> torch.Event:
        """Return an event that fires when all copies queued so far have landed."""
        return self.copy_stream.record_event()

    def gather(self, collective: Callable[[], _Work], nbytes: int = 0) -> _Work:
        """Queue a collective behind all copies queued so far; the host does not block, unless the collective's backend does.

        Args:
            collective: Begins it.
            nbytes: How much comes from other ranks.
        """
        self.gather_stream.wait_event(self.record_copies())
        with self.gather_stream:
            work = collective()
        if (recorder := self.recorder) is not None:
            recorder.gather_begins(self.gather_stream, work, nbytes)
        return work

    def end_gather(self, work: Iterable[_Waitable]) -> torch.Event:
        """Return an event that fires when collectives are done; the host blocks where their backend runs them on the host (gloo)."""
        recorder = self.recorder
        with self.landing_stream:
            for one in work:
                one.wait()
                if recorder is not None:
                    recorder.gather_ends(self.landing_stream, one)
        return self.landing_stream.record_event()

    def after(self, event: torch.Event) -> None:
        """Let the copy stream wait for an event; the host does not block."""
        recorder = self.recorder
        if recorder is not None:
            recorder.copies_wait(self.copy_stream)
        self.copy_stream.wait_event(event)
        if recorder is not None:
            recorder.copies_go_on(self.copy_stream)

    def wait(self, event: torch.Event) -> None:
        """Let the current stream wait for an event; the host does not block."""
        self.current_stream().wait_event(event)

    def block(self) -> None:
        """Let the host wait for all that the device has to do."""
        torch.accelerator.synchronize(self.device)

    def block_on(self, event: torch.Event) -> None:
        """Let the host wait for an event."""
        recorder = self.recorder
        if recorder is not None:
            recorder.host_waits()
        event.synchronize()
        if recorder is not None:
            recorder.host_goes_on()


@functools.cache
def _accelerator(device: torch.device) -> Accelerator:
    return Accelerator(device)
