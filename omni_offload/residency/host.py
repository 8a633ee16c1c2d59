"""The host side of offloaded weights: the master of a group, how groups lie in a pinned arena, the staging ring."""

import ctypes
import threading
import weakref

import attrs
import torch

from omni_offload.accelerator import Accelerator, PinnedMemory
from omni_offload.residency.mapped import MappedFile
from omni_offload.residency.tensors import ALIGNMENT, Placement, Shape, shape_of, view_of

__all__ = ["ByteMeter", "HostMaster", "StagingRing", "master_of", "next_offset"]

#: Sampled values a group; a fused adapter changes nearly every one of them.
_SAMPLES = 16
_WORD = 8
_STAGING_CHUNKS = 2


class ByteMeter:
    """Bytes held now, and the most that were held at once. A holder that is gone holds nothing."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self.peak = 0

    @property
    def current(self) -> int:
        """Bytes held now."""
        return sum(self._held.values())

    def add(self, holder: object, nbytes: int) -> None:
        """Count bytes that a holder holds from now on."""
        self._held[holder] = nbytes
        self.peak = max(self.peak, self.current)

    def remove(self, holder: object) -> None:
        """Count a holder's bytes no longer. Idempotent."""
        self._held.pop(holder, None)


@attrs.frozen(eq=False)
class HostMaster:
    """The authoritative bytes of a group, and what the group's tensors are bound to while no activation runs.

    Attributes:
        raw: The bytes, uint8.
        views: Per entry of the group, the tensor on `raw` that stands for it.
        region: The pinned arena, or the mapped file, that the bytes lie in, if any.
        offset: Where in the region.
        shapes: Per view, what tells that a tensor is bound to it.
        sampled: Where in the bytes the values lie that stand for them: words of 8 bytes, or single bytes where there are fewer.
    """

    raw: torch.Tensor
    views: tuple[torch.Tensor, ...]
    region: PinnedMemory | MappedFile | None = None
    offset: int = 0
    shapes: tuple[Shape, ...] = attrs.field(init=False)
    sampled: tuple[int, ...] = attrs.field(init=False)
    _samples: list[ctypes.c_int64 | ctypes.c_uint8] = attrs.field(factory=list, init=False)
    _address: int = attrs.field(init=False)

    @shapes.default
    def _make_shapes(self) -> tuple[Shape, ...]:
        return tuple(map(shape_of, self.views))

    @sampled.default
    def _choose_samples(self) -> tuple[int, ...]:
        nbytes = self.raw.numel()
        if nbytes < _WORD:
            return tuple(range(nbytes))
        last = nbytes - _WORD
        return tuple(sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}))

    @_address.default
    def _make_address(self) -> int:
        return self.raw.data_ptr()

    def fingerprint(self) -> list[int] | None:
        """Return sampled values of the bytes: edits through `.data` move no version counter (about 1 us). None: they were moved."""
        if self.raw.data_ptr() != self._address:  # the storage was resized by its user
            return None
        if not self._samples:  # what is never asked for, as of a block that moves as one, is not made
            kind = ctypes.c_uint8 if self.raw.numel() < _WORD else ctypes.c_int64
            self._samples.extend([kind.from_address(self._address + place) for place in self.sampled])
        return [sample.value for sample in self._samples]

    @property
    def pinned(self) -> bool:
        """Whether copies from these bytes need not block the host."""
        if isinstance(self.region, MappedFile):
            return self.region.is_locked(self.offset, self.raw.numel())
        return self.region is not None and self.region.pinned

    @property
    def mapped(self) -> bool:
        """Whether these bytes are those of a mapped file."""
        return isinstance(self.region, MappedFile)

    @property
    def passing(self) -> bool:
        """Whether weights are not to be left in these bytes when their management ends."""
        if isinstance(self.region, MappedFile):
            return not (self.region.kept or self.region.changed)
        return self.region is not None and self.region.stays_pinned


def master_of(placement: Placement, raw: torch.Tensor, region: PinnedMemory | MappedFile | None = None, offset: int = 0) -> HostMaster:
    """Make the master of a group on given bytes."""
    pairs = zip(placement.entries, placement.offsets, strict=True)
    return HostMaster(raw, tuple(view_of(raw, at, entry.tensor) for entry, at in pairs), region, offset)


def next_offset(placement: Placement, end: int) -> int:
    """Return where a group goes in an arena that is filled up to `end` (bytes).

    It keeps its address modulo `ALIGNMENT`, so that results on the host stay the same to the last bit.
    """
    phase = placement.start % ALIGNMENT if placement.device.type == "cpu" else 0
    return -(-(end - phase) // ALIGNMENT) * ALIGNMENT + phase


class StagingRing:
    """A few pinned chunks through which pageable weights are copied without one blocking copy after another.

    Args:
        accelerator: The device copied to.
        nbytes: Most bytes of the whole ring, which has two chunks.
    """

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        chunk_bytes = nbytes // _STAGING_CHUNKS
        self._accelerator = accelerator
        self._region = PinnedMemory(accelerator, chunk_bytes * _STAGING_CHUNKS)
        self._chunks = [self._region.slice(i * chunk_bytes, chunk_bytes) for i in range(_STAGING_CHUNKS)]
        self._free: list[torch.Event | None] = [None] * _STAGING_CHUNKS
        self._next = 0
        self._lock = threading.Lock()
        self.nbytes = self._region.charged

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a host-to-device copy of pageable bytes; the host blocks while it fills a chunk, and until a chunk is free."""
        with self._lock, torch.inference_mode(mode=False):
            for start in range(0, source.numel(), self._chunks[0].numel()):
                index, self._next = self._next, (self._next + 1) % _STAGING_CHUNKS
                if (event := self._free[index]) is not None:
                    self._accelerator.block_on(event)
                part = source[start : start + self._chunks[index].numel()]
                chunk = self._chunks[index][: part.numel()]
                chunk.copy_(part)
                self._accelerator.copy(target[start : start + part.numel()], chunk)
                self._free[index] = self._accelerator.record_copies()

    def unpin(self) -> None:
        """Give the pinned bytes back. Blocks the host until queued copies are done."""
        self._region.unpin()
