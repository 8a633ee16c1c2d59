"""Device memory that groups' copies lie in, and the events that guard it."""

import weakref
from collections.abc import Iterable, Sequence
from typing import ClassVar

import attrs
import torch

from omni_offload.accelerator import Accelerator
from omni_offload.residency.host import ByteMeter
from omni_offload.residency.tensors import Shape, is_shaped, shape_of, view_of

__all__ = ["DeviceBuffer", "DeviceCopy", "buffers_of"]


class DeviceBuffer:
    """One device allocation that some groups' copies lie in, and the events that guard it.

    Attributes:
        accelerator: The device.
        raw: The bytes, uint8, owned by the copy stream; None once freed.
        ready: Fires when the last copy into it has landed; every stream that uses it waits for it.
        uses: Per stream, the event after its last use; the copy stream waits for them before the bytes are written or freed.
        thinned: Whether a part was given back, and the memory is held for the others.
        passing: Whether it is a slot: what lies there is overwritten when its tenant leaves, whoever else knows it.
    """

    passing: ClassVar[bool] = False

    def __init__(self, accelerator: Accelerator, nbytes: int, meter: ByteMeter) -> None:
        self.accelerator = accelerator
        self._meter = meter
        self._takers: set[object] = set()
        self.nbytes = nbytes
        self.ready: torch.Event | None = None
        self.uses: dict[int, torch.Event] = {}
        self.thinned = False
        self.raw: torch.Tensor | None = accelerator.allocate(nbytes)
        meter.add(self, nbytes)
        if (recorder := accelerator.recorder) is not None:
            recorder.holds(meter)
        # Also memory that nobody gave back is freed in the order of the copy stream.
        self._unfreed = weakref.finalize(self, _order_after, accelerator, self.uses)
        self._unfreed.atexit = False

    def take(self, taker: object, offset: int, nbytes: int) -> torch.Tensor:
        """Return a part of the bytes; the memory is freed when every taker has given its part back."""
        if self.raw is None:
            raise RuntimeError("the device buffer was freed")
        self._takers.add(taker)
        return self.raw[offset : offset + nbytes]

    def order_after_uses(self) -> None:
        """Let the copy stream wait for every stream that used the bytes. The host does not block."""
        _order_after(self.accelerator, self.uses)

    def give_back(self, taker: object) -> None:
        """Let go of one taker's part, and of the memory with the last. Idempotent."""
        self._takers.discard(taker)
        self.thinned = True
        if not self._takers:
            self.free()

    def free(self) -> None:
        """Let go of the memory, in the order of the copy stream. Idempotent."""
        if self.raw is not None:
            self.order_after_uses()
            self._meter.remove(self)
            if (recorder := self.accelerator.recorder) is not None:
                recorder.holds(self._meter)
            self._unfreed.detach()
            self.raw = None


def _order_after(accelerator: Accelerator, uses: dict[int, torch.Event]) -> None:
    for event in uses.values():
        accelerator.after(event)
    uses.clear()


@attrs.define(eq=False)
class DeviceCopy:
    """A group's bytes on the device, and what the master was when they were copied.

    Attributes:
        raw: The bytes.
        buffer: The allocation they lie in.
        offset: Where in the buffer.
        views: Per entry of the group, the tensor on `raw` that stands for it, and what tells that a tensor is bound to it. Made at
            the first binding: the copy is on its way by then.
        versions: Version counters at the copy, or at the binding.
        fingerprint: Sampled values of the master at the copy; None: the bytes are not what the master is.
    """

    raw: torch.Tensor
    buffer: DeviceBuffer
    offset: int
    views: tuple[tuple[torch.Tensor, ...], tuple[Shape, ...]] | None = attrs.field(default=None, init=False)
    versions: list[int] = attrs.field(factory=list, init=False)
    fingerprint: list[int] | None = attrs.field(default=None, init=False)

    def make_views(self, likes: Sequence[torch.Tensor], offsets: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Make the views and return them: shaped like given tensors, at given offsets (bytes)."""
        views = tuple(view_of(self.raw, at, like) for like, at in zip(likes, offsets, strict=True))
        self.views = views, tuple(map(shape_of, views))
        return views

    def here(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Say of each tensor whether it is bound to the copy."""
        return [False] * len(tensors) if self.views is None else [*map(is_shaped, tensors, self.views[1])]


def buffers_of(copies: Iterable[DeviceCopy | None]) -> set[DeviceBuffer]:
    """Return the buffers that some copies lie in."""
    return {copy.buffer for copy in copies if copy is not None}
