"""The host side of offloaded weights: the master of a group, pinned arenas, the staging ring, and what one owner shares."""

import ctypes
from collections.abc import Sequence

import attrs
import torch

from omni_offload.accelerator import Accelerator, PinnedMemory
from omni_offload.errors import OffloadConfigError
from omni_offload.residency.tensors import ALIGNMENT, Placement, view_of

__all__ = ["ByteMeter", "HostMaster", "ResidencyContext", "StagingRing", "master_of", "masters_in_arena"]

_SAMPLES = 16
_STAGING_CHUNKS = 2
_STAGING_CHUNK_BYTES = 16 << 20
_STAGING_MIN_CHUNK_BYTES = 4096
#: Weights that appear after enabling (adapters) are pinned from this size on; locking pages costs more than it gains below.
_LATE_PIN_BYTES = 1 << 20


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


def masters_in_arena(placements: Sequence[Placement], context: "ResidencyContext") -> list[HostMaster] | None:
    """Make one exact-size pinned arena for some groups; None where the context does not pin that much. Nothing is copied yet.

    Each group has a storage of its own on the arena, at its former address modulo `ALIGNMENT`, so that results on the host stay
    the same to the last bit.

    Raises:
        RuntimeError: The device refused to pin.
    """
    offsets, end = [], 0
    for placement in placements:
        start = placement.start % ALIGNMENT if placement.device.type == "cpu" else 0
        at = -(-(end - start) // ALIGNMENT) * ALIGNMENT + start
        offsets.append(at)
        end = at + placement.nbytes
    region = context.pin(end) if end else None
    if region is None:
        return None
    pairs = zip(placements, offsets, strict=True)
    return [master_of(p, region.slice(at, p.nbytes) if p.nbytes else p.raw().cpu(), region, at) for p, at in pairs]


class StagingRing:
    """A few pinned chunks through which pageable weights are copied without one blocking copy after another.

    Args:
        accelerator: The device copied to.
        chunk_bytes: Size of each of the two chunks.
    """

    def __init__(self, accelerator: Accelerator, chunk_bytes: int) -> None:
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


@attrs.define(eq=False)
class ResidencyContext:
    """What the residencies of one owner share: device, pinned bytes, and the meter of device bytes.

    Attributes:
        accelerator: The device.
        pin_memory: Whether masters are pinned.
        host_limit: Most pinned bytes; None: no limit. Weights beyond it stay pageable and go through a staging ring.
        meter: Device bytes held.
    """

    accelerator: Accelerator
    pin_memory: bool = True
    host_limit: int | None = None
    meter: ByteMeter = attrs.Factory(ByteMeter)
    _regions: list[PinnedMemory] = attrs.field(factory=list, init=False)
    _staging: StagingRing | None = attrs.field(default=None, init=False)

    @property
    def pinned_bytes(self) -> int:
        """Pinned host bytes that are held now, the staging ring's included."""
        self._regions = [region for region in self._regions if region.pinned]
        return sum(region.charged for region in self._regions) + (self._staging.nbytes if self._staging else 0)

    def pin(self, nbytes: int, *, late: bool = False) -> PinnedMemory | None:
        """Return a pinned region, or None where pinning is off, above the limit, or (late) not worth it."""
        if not self.pin_memory or (late and nbytes < _LATE_PIN_BYTES):
            return None
        if self.host_limit is not None and self.pinned_bytes + nbytes > self.host_limit:
            return None
        region = PinnedMemory(self.accelerator, nbytes)
        self._regions.append(region)
        return region

    def reserve_staging(self) -> None:
        """Make the staging ring for weights that stay pageable, once.

        Raises:
            OffloadConfigError: The limit leaves no room for the smallest ring.
        """
        if self._staging is not None or not self.pin_memory:
            return
        room = _STAGING_CHUNKS * _STAGING_CHUNK_BYTES
        if self.host_limit is not None:
            room = min(room, self.host_limit - self.pinned_bytes)
        chunk = room // _STAGING_CHUNKS // _STAGING_MIN_CHUNK_BYTES * _STAGING_MIN_CHUNK_BYTES
        if chunk <= 0:
            raise OffloadConfigError(
                f"host_memory={self.host_limit} leaves no room for a staging ring of {_STAGING_CHUNKS} x "
                f"{_STAGING_MIN_CHUNK_BYTES} bytes; raise host_memory, or set pin_memory=False"
            )
        self._staging = StagingRing(self.accelerator, chunk)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """Queue a host-to-device copy of bytes, through the staging ring where the source is pageable and there is one."""
        if pinned or self._staging is None:
            self.accelerator.copy(target, source)
        else:
            self._staging.copy(target, source)

    def close(self) -> None:
        """Unpin everything. Idempotent; blocks the host until queued copies are done."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.unpin()
        for region in self._regions:
            region.unpin()
        self._regions.clear()
