"""What the residencies of one owner share: which tensors are theirs, how they are grouped, and the pinned host memory."""

import threading
import weakref
from collections.abc import Iterable, MutableMapping, Sequence

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from omni_offload.accelerator import Accelerator, PinnedMemory
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.residency.group import Group
from omni_offload.residency.host import ByteMeter, StagingRing, arena_layout, master_of, masters_in_region
from omni_offload.residency.tensors import Entry, Placement, group_by_bytes

__all__ = ["ResidencyContext"]

#: Bytes of the staging ring, and the least it works with (two pages).
_STAGING_BYTES = 32 << 20
_STAGING_MIN_BYTES = 8192
#: Weights that appear after enabling (adapters) are pinned from this size on; locking pages costs more than it gains below.
_LATE_PIN_BYTES = 1 << 20

#: Tensor object -> weak reference to the context that manages it: at most one does.
_OWNERS: MutableMapping[torch.Tensor, "weakref.ref[ResidencyContext]"] = WeakIdKeyDictionary()
_OWNERS_LOCK = threading.RLock()


@attrs.define(eq=False)
class ResidencyContext:
    """One owner's tensors and host memory.

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
    _entries: dict[int, Entry] = attrs.field(factory=dict, init=False)
    _groups: dict[int, Group] = attrs.field(factory=dict, init=False)
    _regions: "weakref.WeakSet[PinnedMemory]" = attrs.field(factory=weakref.WeakSet, init=False)
    _staging: StagingRing | None = attrs.field(default=None, init=False)

    # ---- tensors -----------------------------------------------------------------------------------------------------------

    def claim(self, entries: Iterable[Entry], asker: str) -> list[Entry]:
        """Return the owner's one entry for each tensor.

        Raises:
            OffloadStateError: Another owner manages one of the tensors. Nothing is claimed then.
        """
        entries = list(entries)
        with _OWNERS_LOCK:
            for entry in entries:
                owner = _OWNERS.get(entry.tensor)
                if owner is not None and owner() not in (None, self):
                    raise OffloadStateError(
                        f"{asker}: {entry.name} is managed by another offload owner already; disable that one first, or share "
                        "the whole component with the same device and pinning"
                    )
        return [self._entries.setdefault(id(entry.tensor), entry) for entry in entries]

    def groups_of(self, entries: Sequence[Entry], *, keep_origin: bool = False, late: bool = False) -> list[Group]:
        """Return the groups of some claimed entries, with a master each; groups that are as they were left are kept.

        Weights that have no master yet get one: a pinned arena, else their own memory. Those found on the device are copied to
        the host, which blocks.

        Args:
            entries: Claimed entries.
            keep_origin: Keep the device memory that weights were found in, for an undo.
            late: Whether the owner is enabled already; few bytes are not pinned then.

        Raises:
            RuntimeError: The device refused to pin memory.
            OffloadConfigError: Pinned memory is needed for staging, and the limit leaves none.
        """
        wanted = {id(entry.tensor) for entry in entries}
        self._own(entries)
        fixed = {id(e.tensor): group for group in set(self._groups.values()) if group.bound for e in group.entries}
        groups = [fixed[key] for key in wanted if key in fixed]
        free = [entry for key, entry in self._entries.items() if key not in fixed]
        fresh: list[tuple[Group, Placement]] = []
        for placement in group_by_bytes(free):
            if wanted.isdisjoint(id(entry.tensor) for entry in placement.entries):
                continue
            group = self._known(placement)
            if group is None:
                group = Group(placement)
                for entry in placement.entries:
                    self._groups[id(entry.tensor)] = group
            if group.master is None:
                fresh.append((group, placement))
            groups.append(group)
        self._adopt(fresh, keep_origin=keep_origin, late=late)
        return list(dict.fromkeys(groups))

    def release(self, entries: Iterable[Entry]) -> None:
        """Forget tensors that no residency of the owner uses any more. Idempotent."""
        with _OWNERS_LOCK:
            for entry in entries:
                key = id(entry.tensor)
                group = self._groups.get(key)
                if group is None or not group.users:
                    self._groups.pop(key, None)
                    self._entries.pop(key, None)
                    _OWNERS.pop(entry.tensor, None)

    def _own(self, entries: Iterable[Entry]) -> None:
        reference = weakref.ref(self)
        with _OWNERS_LOCK:
            for entry in entries:
                _OWNERS[entry.tensor] = reference

    def _known(self, placement: Placement) -> Group | None:
        """Return the group for exactly these tensors, where it has no master yet or they are as it left them."""
        group = self._groups.get(id(placement.entries[0].tensor))
        if group is None or {*group.entries} != {*placement.entries}:
            return None
        return group if group.intact() else None

    def _adopt(self, fresh: Sequence[tuple[Group, Placement]], *, keep_origin: bool, late: bool) -> None:
        placements = [placement for _, placement in fresh]
        offsets, size = arena_layout(placements)
        region = self.pin(size, late=late)
        masters = None if region is None else masters_in_region(placements, offsets, region)
        if region is None and self.pin_memory and size and not late:
            self.reserve_staging()
        for index, (group, placement) in enumerate(fresh):
            source = placement.raw()
            if masters is not None:
                master = masters[index]
                master.raw.copy_(source)
            else:
                master = master_of(placement, source.cpu())  # the memory itself, where it is on the host
            if placement.device.type != "cpu":
                group.found_bytes = placement.nbytes
                group.origin = tuple(entry.tensor.data for entry in group.entries) if keep_origin else None
            group.adopt(master)

    # ---- host memory -------------------------------------------------------------------------------------------------------

    @property
    def pinned_bytes(self) -> int:
        """Pinned host bytes that are held now, the staging ring's included."""
        pinned = sum(region.charged for region in self._regions if region.pinned)
        return pinned + (self._staging.nbytes if self._staging else 0)

    def pin(self, nbytes: int, *, late: bool = False) -> PinnedMemory | None:
        """Return a pinned region, or None where pinning is off, above the limit, or (late) not worth it.

        Raises:
            RuntimeError: The device refused.
        """
        if not self.pin_memory or nbytes == 0 or (late and nbytes < _LATE_PIN_BYTES):
            return None
        if self.host_limit is not None and self.pinned_bytes + nbytes > self.host_limit:
            return None
        region = PinnedMemory(self.accelerator, nbytes)
        self._regions.add(region)
        return region

    def reserve_staging(self) -> None:
        """Make the staging ring for weights that stay pageable, once; it takes at most a quarter of the limit.

        Raises:
            OffloadConfigError: The limit leaves no room for the smallest ring.
        """
        if self._staging is not None or not self.pin_memory:
            return
        room = _STAGING_BYTES
        if self.host_limit is not None:
            room = min(room, max(self.host_limit // 4, _STAGING_MIN_BYTES), self.host_limit - self.pinned_bytes)
        if room < _STAGING_MIN_BYTES:
            raise OffloadConfigError(
                f"host_memory={self.host_limit} bytes leaves {room} for the staging ring that unpinned weights go through, which "
                f"needs {_STAGING_MIN_BYTES}; raise host_memory, or set pin_memory=False"
            )
        self._staging = StagingRing(self.accelerator, room)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """Queue a host-to-device copy of bytes, through the staging ring where the source is pageable and there is one."""
        if pinned or self._staging is None:
            self.accelerator.copy(target, source)
        else:
            self._staging.copy(target, source)

    def close(self) -> None:
        """Unpin everything. Idempotent; blocks the host until queued copies are done."""
        if self._staging is not None:
            self._staging.unpin()
            self._staging = None
        for region in list(self._regions):
            region.unpin()
