"""The host side of offloaded weights: the master of a group, pinned arenas, the staging ring."""

import ctypes
from collections.abc import Sequence

import attrs
import torch

from omni_offload.accelerator import Accelerator, PinnedMemory
from omni_offload.residency.tensors import ALIGNMENT, Placement, view_of

__all__ = ["ByteMeter", "HostMaster", "StagingRing", "arena_layout", "master_of", "masters_in_region"]

#: Sampled values a group; a fused adapter changes nearly every one of them.
_SAMPLES = 16
_STAGING_CHUNKS = 2


@attrs.define
class ByteMeter:
    """Bytes held now, and the most that were held at once."""

    current: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that are held from now on."""
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def remove(self, nbytes: int) -> None:
        """Count bytes that are held no longer."""
        self.current -= nbytes


@attrs.frozen(eq=False)
class HostMaster:
    """The authoritative bytes of a group, and what the group's tensors are bound to while no activation runs.

    Attributes:
        raw: The bytes, uint8.
        views: Per entry of the group, the tensor on `raw` that stands for it.
        region: The pinned arena the bytes lie in, if any.
        offset: Where in the region.
    """

    raw: torch.Tensor
    views: tuple[torch.Tensor, ...]
    region: PinnedMemory | None = None
    offset: int = 0
    _samples: tuple[ctypes.c_int64 | ctypes.c_uint8, ...] = attrs.field(init=False)

    @_samples.default
    def _make_samples(self) -> tuple[ctypes.c_int64 | ctypes.c_uint8, ...]:
        base, nbytes = self.raw.data_ptr(), self.raw.numel()
        if nbytes < 8:
            return tuple(ctypes.c_uint8.from_address(base + i) for i in range(nbytes))
        last = nbytes - 8
        places = sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
        return tuple(ctypes.c_int64.from_address(base + place) for place in places)

    def fingerprint(self) -> list[int]:
        """Return sampled values of the bytes: edits through `.data` move no version counter (about 1 us)."""
        return [sample.value for sample in self._samples]

    @property
    def pinned(self) -> bool:
        """Whether copies from these bytes need not block the host."""
        return self.region is not None and self.region.pinned


def master_of(placement: Placement, raw: torch.Tensor, region: PinnedMemory | None = None, offset: int = 0) -> HostMaster:
    """Make the master of a group on given bytes."""
    pairs = zip(placement.entries, placement.offsets, strict=True)
    return HostMaster(raw, tuple(view_of(raw, at, entry.tensor) for entry, at in pairs), region, offset)


def arena_layout(placements: Sequence[Placement]) -> tuple[list[int], int]:
    """Lay groups out one after another; return their offsets and the exact size (bytes).

    Each group keeps its address modulo `ALIGNMENT`, so that results on the host stay the same to the last bit.
    """
    offsets, end = [], 0
    for placement in placements:
        phase = placement.start % ALIGNMENT if placement.device.type == "cpu" else 0
        at = -(-(end - phase) // ALIGNMENT) * ALIGNMENT + phase
        offsets.append(at)
        end = at + placement.nbytes
    return offsets, end


def masters_in_region(placements: Sequence[Placement], offsets: Sequence[int], region: PinnedMemory) -> list[HostMaster]:
    """Make the masters of groups at given offsets of a pinned region. Nothing is copied yet."""
    pairs = zip(placements, offsets, strict=True)
    return [master_of(p, region.slice(at, p.nbytes), region, at) if p.nbytes else master_of(p, p.raw().cpu()) for p, at in pairs]


class StagingRing:
    """A few pinned chunks through which pageable weights are copied without one blocking copy after another.

    Args:
        accelerator: The device copied to.
        nbytes: Size of the whole ring, which has two chunks.
    """

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        chunk_bytes = nbytes // _STAGING_CHUNKS
        self._accelerator = accelerator
        self._region = PinnedMemory(accelerator, chunk_bytes * _STAGING_CHUNKS)
        self._chunks = [self._region.slice(i * chunk_bytes, chunk_bytes) for i in range(_STAGING_CHUNKS)]
        self._free: list[torch.Event | None] = [None] * _STAGING_CHUNKS
        self._next = 0
        self.nbytes = self._region.charged

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a host-to-device copy of pageable bytes; the host blocks while it fills a chunk, and until a chunk is free."""
        for start in range(0, source.numel(), self._chunks[0].numel()):
            index, self._next = self._next, (self._next + 1) % _STAGING_CHUNKS
            if (event := self._free[index]) is not None:
                event.synchronize()
            part = source[start : start + self._chunks[index].numel()]
            chunk = self._chunks[index][: part.numel()]
            chunk.copy_(part)
            self._accelerator.copy(target[start : start + part.numel()], chunk)
            self._free[index] = self._accelerator.record_copies()

    def unpin(self) -> None:
        """Give the pinned bytes back. Blocks the host until queued copies are done."""
        self._region.unpin()
