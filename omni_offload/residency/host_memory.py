"""The host memory that an owner's masters lie in: how much of it is pinned, within a limit, and what stays pageable."""

import logging
from collections.abc import Collection

import attrs
import torch

from omni_offload.accelerator import Accelerator, PinnedMemory, host_memory_limit
from omni_offload.errors import OffloadConfigError
from omni_offload.residency.host import StagingRing

__all__ = ["HostMemory"]

logger = logging.getLogger(__name__)

#: Bytes of the staging ring, and the least it works with (two pages).
_STAGING_BYTES = 32 << 20
_STAGING_MIN_BYTES = 8192


@attrs.define(eq=False)
class HostMemory:
    """One owner's pinned memory.

    Attributes:
        accelerator: The device.
        pin_memory: Whether masters are pinned.
        limit: Most pinned bytes; None: no limit but `host_memory_limit`. Weights beyond it stay pageable and go through a staging ring.
    """

    accelerator: Accelerator
    pin_memory: bool
    limit: int | None
    _ceiling: int | None = attrs.field(factory=host_memory_limit, init=False)
    _regions: set[PinnedMemory] = attrs.field(factory=set, init=False)
    _held: set[PinnedMemory] = attrs.field(factory=set, init=False)
    _staging: StagingRing | None = attrs.field(default=None, init=False)

    # ---- pinned ------------------------------------------------------------------------------------------------------------

    def pin(self, nbytes: int) -> PinnedMemory | None:
        """Return a region that groups of weights lie in, until `keep` is told of others only; None for no bytes.

        Raises:
            RuntimeError: The device refused to pin memory.
        """
        if nbytes == 0:
            return None
        region = PinnedMemory(self.accelerator, nbytes)
        self._regions.add(region)
        return region

    def keep(self, used: Collection[PinnedMemory | None]) -> None:
        """Unpin the regions of `pin` that are not among those which are still used. Idempotent."""
        for region in [region for region in self._regions if region not in used]:
            region.unpin()  # not left to the collector, in which an interrupt would be lost
            self._regions.discard(region)

    def hold(self, nbytes: int) -> tuple[torch.Tensor, PinnedMemory | None]:
        """Return host memory (uint8, `[nbytes]`, any values) that no group lies in, and its region where it is pinned; `let_go` ends it.

        Raises:
            RuntimeError: The device refused to pin memory.
            OffloadConfigError: Pinned memory is needed for staging, and the limit leaves none.
        """
        room = self.room
        if self.pin_memory and nbytes and room is not None and PinnedMemory.cost(self.accelerator, nbytes) > room:
            self.reserve_staging()
        elif self.pin_memory and nbytes:
            region = PinnedMemory(self.accelerator, nbytes)
            self._held.add(region)
            return region.raw, region
        with torch.inference_mode(mode=False):
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), None

    def let_go(self, region: PinnedMemory) -> None:
        """Unpin what `hold` gave. Idempotent."""
        region.unpin()
        self._held.discard(region)

    @property
    def room(self) -> int | None:
        """How many more bytes may be pinned; None: no limit."""
        limit = min((limit for limit in (self.limit, self._ceiling) if limit is not None), default=None)
        return None if limit is None else limit - self.pinned_bytes

    @property
    def pinned_bytes(self) -> int:
        """Pinned host bytes that are held now, the staging ring's included."""
        pinned = sum(region.charged for region in (*self._regions, *self._held) if region.pinned)
        return pinned + (self._staging.nbytes if self._staging else 0)

    # ---- staging -----------------------------------------------------------------------------------------------------------

    def reserve_staging(self) -> None:
        """Make the staging ring for weights that stay pageable, once; it takes at most a quarter of the limit.

        Raises:
            OffloadConfigError: `limit` leaves no room for the smallest ring.
        """
        if self._staging is not None or not self.pin_memory:
            return
        left = self.room
        size = self._staging_bytes(left)
        if self.limit is None and left is not None:
            logger.warning(
                "this process may use %s bytes of host memory, fewer than the weights: some of them stay pageable", self._ceiling
            )
        if size:
            self._staging = StagingRing(self.accelerator, size)
        elif self.limit is not None:
            raise OffloadConfigError(
                f"host_memory={self.limit} bytes leaves {left} for the staging ring that unpinned weights go through, "
                f"which needs {_STAGING_MIN_BYTES}; raise host_memory, or set pin_memory=False"
            )

    def _staging_bytes(self, left: int | None) -> int:
        """Return the size of the ring: a quarter of the limit or what is left of it, at most `_STAGING_BYTES`; 0: no room."""
        if left is None:
            return _STAGING_BYTES
        size = min(_STAGING_BYTES, max((left + self.pinned_bytes) // 4, _STAGING_MIN_BYTES))
        while PinnedMemory.cost(self.accelerator, size) > left:
            if size == _STAGING_MIN_BYTES:
                return 0
            size = max(size // 2, _STAGING_MIN_BYTES)
        return size

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """Queue a host-to-device copy of bytes, through the staging ring where the source is pageable and there is one."""
        if pinned or self._staging is None:
            self.accelerator.copy(target, source, pinned=pinned)
        else:
            self._staging.copy(target, source)

    def close(self) -> None:
        """Unpin everything. Idempotent; blocks the host until queued copies are done."""
        if self._staging is not None:
            self._staging.unpin()
            self._staging = None
        for region in (*self._regions, *self._held):
            region.unpin()
            self._regions.discard(region)
            self._held.discard(region)
