"""The host memory that an owner's masters lie in: how much of it is pinned, within a limit, and what stays pageable."""

import logging
from collections.abc import Collection, Iterator

import attrs
import torch

from omni_offload.accelerator import Accelerator, PinnedMemory, host_memory_limit
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.residency.host import StagingRing
from omni_offload.residency.mapped import Checkpoint, MappedFile

__all__ = ["HostMemory"]

logger = logging.getLogger(__name__)

#: Bytes of the staging ring, and the least it works with (two pages).
_STAGING_BYTES = 32 << 20
_STAGING_MIN_BYTES = 8192
#: Bytes of a mapped file that are locked in one go: whole pages, of any size of these.
_LOCKED_CHUNK_BYTES = 256 << 20


@attrs.define(eq=False)
class HostMemory:
    """One owner's pinned memory.

    Attributes:
        accelerator: The device.
        pin_memory: Whether masters are pinned.
        limit: Most pinned bytes; None: no limit but `host_memory_limit`. Weights beyond it stay pageable and go through a staging ring.
        lockable: Most bytes of mapped files whose pages are locked.
        unlocked: Why the pages of mapped files are not locked, though they were to be; empty where they are.
    """

    accelerator: Accelerator
    pin_memory: bool
    limit: int | None
    lockable: int = 0
    unlocked: str = attrs.field(default="", init=False)
    _ceiling: int | None = attrs.field(factory=host_memory_limit, init=False)
    _regions: set[PinnedMemory] = attrs.field(factory=set, init=False)
    _held: set[PinnedMemory] = attrs.field(factory=set, init=False)
    _staging: StagingRing | None = attrs.field(default=None, init=False)
    _checkpoints: list[Checkpoint] = attrs.field(factory=list, init=False)
    _locked: list[MappedFile] = attrs.field(factory=list, init=False)

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

    def keep(self, used: Collection[PinnedMemory | MappedFile | None]) -> None:
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
        return pinned + (self._staging.nbytes if self._staging else 0) + sum(file.locked_bytes for file in self._locked)

    # ---- mapped ------------------------------------------------------------------------------------------------------------

    def attach(self, checkpoint: Checkpoint) -> None:
        """Let weights lie in the files of a checkpoint, until `close`. Idempotent.

        Raises:
            OffloadConfigError: They are to go through the staging ring, and the limit leaves none.
        """
        if checkpoint not in self._checkpoints:
            self.reserve_staging(short=False)
            self._checkpoints.append(checkpoint)

    def lock_files(self) -> None:
        """Lock pages of mapped files, as many as may be; where the device refuses, the rest goes through the staging ring."""
        if not self.lockable or self.unlocked:
            return
        for file in [file for checkpoint in self._checkpoints for file in checkpoint.mapped.values()]:
            if file not in self._locked:
                self._locked.append(file)  # first, so that an interrupt is undone
            others = sum(other.locked_bytes for other in self._locked if other is not file)
            room = self.room
            limit = self.lockable - others if room is None else min(self.lockable - others, room + file.locked_bytes)
            try:
                file.lock(self.accelerator, limit=limit, chunk=_LOCKED_CHUNK_BYTES)
            except RuntimeError as error:
                self.unlocked = f"pages of {file.path} could not be locked ({error})"
                logger.warning("%s: its weights go through the staging ring", self.unlocked)
                return

    def refuse_changed(self) -> None:
        """Refuse to go on with a mapped file that was written to.

        Raises:
            OffloadStateError: There is one; by name.
        """
        if changes := [*self.changes()]:
            raise OffloadStateError(f"{'; '.join(changes)}; call disable_omni_offload(), and load the component again")

    def changes(self) -> Iterator[str]:
        """Yield which mapped file was written to."""
        for checkpoint in self._checkpoints:
            yield from checkpoint.changes()

    def keep_files(self) -> None:
        """Leave weights in the mapped files when their management ends: for a process that ends, too."""
        for checkpoint in self._checkpoints:
            for file in checkpoint.mapped.values():
                file.kept = True

    # ---- staging -----------------------------------------------------------------------------------------------------------

    def reserve_staging(self, *, short: bool = True) -> None:
        """Make the staging ring for weights that stay pageable, once; it takes at most a quarter of the limit.

        Args:
            short: They stay so because memory is short.

        Raises:
            OffloadConfigError: `limit` leaves no room for the smallest ring.
        """
        if self._staging is not None or not self.pin_memory:
            return
        left = self.room
        size = self._staging_bytes(left)
        if short and self.limit is None and left is not None:
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
        for file in self._locked:
            start = source.data_ptr() - file.raw.data_ptr()
            if 0 <= start < file.nbytes:
                for begin, end, locked in file.pieces(start, source.numel()):
                    self._copy(target[begin:end], source[begin:end], pinned=locked)
                return
        self._copy(target, source, pinned=pinned)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        if pinned or self._staging is None:
            self.accelerator.copy(target, source, pinned=pinned)
        else:
            self._staging.copy(target, source)

    def close(self) -> None:
        """Unpin everything, and let mapped files go. Idempotent; blocks the host until queued copies are done."""
        if self._staging is not None:
            self._staging.unpin()
            self._staging = None
        for region in (*self._regions, *self._held):
            region.unpin()
            self._regions.discard(region)
            self._held.discard(region)
        for checkpoint in self._checkpoints:
            checkpoint.close()
        self._locked.clear()
        self._checkpoints.clear()
