"""What the residencies of one owner share: which tensors are theirs, how they are grouped, and the pinned host memory."""

import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

import attrs
import torch

from omni_offload.accelerator import Accelerator, PinnedMemory
from omni_offload.errors import OffloadStateError
from omni_offload.residency.group import Group
from omni_offload.residency.host import ByteMeter, HostMaster, master_of, next_offset
from omni_offload.residency.host_memory import HostMemory
from omni_offload.residency.mapped import Checkpoint, MappedFile
from omni_offload.residency.slots import SlotPool
from omni_offload.residency.tensors import Entry, Placement, Placements, group_by_bytes, type_of

__all__ = ["LATE_PIN_BYTES", "ResidencyContext"]

#: Weights that appear after enabling (adapters) are pinned from this size on; locking pages costs more than it gains below.
LATE_PIN_BYTES = 1 << 20
#: Most bytes of one pinned region: while it is filled, the memory that the weights came from is not freed yet.
_REGION_BYTES = 1 << 30

#: Id of a tensor -> the context that manages it: at most one does, and keeps the tensor alive. No weak reference to a tensor: it
#: would keep `torch.utils.swap_tensors` from working.
_OWNERS: dict[int, "weakref.ref[ResidencyContext]"] = {}
_OWNERS_LOCK = threading.RLock()

Fresh = tuple[Group, Placement]


@attrs.define(eq=False)
class ResidencyContext:
    """One owner's tensors and host memory.

    Attributes:
        accelerator: The device.
        pin_memory: Whether masters are pinned.
        host_limit: Most pinned bytes; None: no limit but `host_memory_limit`. Weights beyond it stay pageable and go through a
            staging ring.
        meter: Device bytes held.
        slots: The device buffers that all blocks take turns in which stream.
        lockable: Most bytes of mapped files whose pages are locked.
        host: The memory that masters are pinned in.
    """

    accelerator: Accelerator
    pin_memory: bool = True
    host_limit: int | None = None
    lockable: int = 0
    meter: ByteMeter = attrs.Factory(ByteMeter)
    slots: SlotPool = attrs.field(init=False)
    host: HostMemory = attrs.field(init=False)
    _entries: dict[int, Entry] = attrs.field(factory=dict, init=False)
    _groups: dict[int, Group] = attrs.field(factory=dict, init=False)

    @slots.default
    def _make_slots(self) -> SlotPool:
        return SlotPool(self.accelerator, self.meter)

    @host.default
    def _make_host(self) -> HostMemory:
        return HostMemory(self.accelerator, self.pin_memory, self.host_limit, self.lockable)

    # ---- tensors -----------------------------------------------------------------------------------------------------------

    def claim(self, entries: Iterable[Entry], asker: str) -> list[Entry]:
        """Return the owner's one entry for each tensor.

        Raises:
            OffloadStateError: Another owner manages one of the tensors. Nothing is claimed then.
        """
        entries = list(entries)
        with _OWNERS_LOCK:
            self._refuse_second_owner(entries, asker)
            return [self._entries.setdefault(id(entry.tensor), entry) for entry in entries]

    def own(self, entries: Sequence[Entry], asker: str) -> None:
        """Become the owner of claimed tensors, until `release`.

        Raises:
            OffloadStateError: Another owner manages one of them meanwhile. Nothing is owned then.
        """
        reference = weakref.ref(self)
        with _OWNERS_LOCK:
            self._refuse_second_owner(entries, asker)
            for key in [key for key, owner in _OWNERS.items() if owner() is None]:
                del _OWNERS[key]
            for entry in entries:
                _OWNERS[id(entry.tensor)] = reference

    def groups_of(  # noqa: PLR0913  (each says what is special about the tensors)
        self,
        entries: Sequence[Entry],
        *,
        keep_origin: bool = False,
        pin_from: int | None = 1,
        leaving: AbstractSet[int] = frozenset(),
        checkpoint: Checkpoint | None = None,
        placements: Placements | None = None,
    ) -> list[Group]:
        """Return the groups of some owned entries, with a master each; groups that are as they were left are kept.

        Weights that have no master yet get one: in the mapped file that holds their bytes, in a pinned arena, else their own memory.
        Those found on the device are copied to the host, which blocks. Where this is cut short, the groups that were made are found by
        `known_groups`.

        Args:
            entries: Owned entries.
            keep_origin: Keep the device memory that weights were found in, for an undo.
            pin_from: Fewer bytes than these are not worth pinning; None: pin nothing.
            leaving: Ids of tensors that are released next: new views of their memory do not count as theirs.
            checkpoint: The files that the weights may stand in.
            placements: Where the tensors are, from `place`; what is not known there, and None, is looked for among all tensors.

        Raises:
            RuntimeError: The device refused to pin memory.
            OffloadConfigError: Pinned memory is needed for staging, and the limit leaves none; or tensors overlap strangely.
        """
        wanted = {id(entry.tensor) for entry in entries}
        groups: list[Group] = []
        fresh: deque[Fresh] = deque()
        free = placements.take(wanted, leaving) if placements is not None else None
        if free is None:
            bound = self._bound()
            groups += [bound[key] for key in wanted if key in bound]
            free = self._place(bound.keys() | leaving, touching=wanted)
        ordered = deque(sorted(free, key=lambda placement: type_of(placement.entries)))  # in the arena as on the device
        del free
        while ordered:
            placement = ordered.popleft()
            group = self._known(placement)
            if group is None:
                group = self._register(Group(placement))
                fresh.append((group, placement))
            groups.append(group)
            del placement  # it keeps the memory that the weights came from
        if checkpoint is not None:
            self._adopt_mapped(fresh, checkpoint, keep_origin=keep_origin)
        self._adopt(fresh, keep_origin=keep_origin, pin_from=pin_from if self.pin_memory else None)
        return sorted(dict.fromkeys(groups), key=lambda group: (type_of(group.entries), group.place_in_file))

    def place(self, entries: Iterable[Entry], asker: str) -> Placements:
        """Claim tensors and find where they are, for several `groups_of` with some of them each.

        Raises:
            OffloadStateError: As `claim` raises it.
            OffloadConfigError: Tensors overlap strangely.
        """
        return Placements(self._place(self._bound().keys(), touching={id(entry.tensor) for entry in self.claim(entries, asker)}))

    def _bound(self) -> dict[int, Group]:
        """Return the groups that are bound to their device copies, by the ids of their tensors."""
        return {id(entry.tensor): group for group in {*self._groups.values()} if group.bound for entry in group.entries}

    def _place(self, but: AbstractSet[int], *, touching: AbstractSet[int]) -> list[Placement]:
        """Find where tensors are, and all that share bytes with them, but for some."""
        return group_by_bytes([entry for key, entry in self._entries.items() if key not in but], touching=touching)

    def known_groups(self, entries: Iterable[Entry]) -> list[Group]:
        """Return the groups that some tensors are in now, complete or not."""
        found = (self._groups.get(id(entry.tensor)) for entry in entries)
        return list(dict.fromkeys(group for group in found if group is not None))

    def entries_beside(self, residencies: Collection[object]) -> list[Entry]:
        """Return the tensors, and those that share bytes with them, that others than some residencies use."""
        groups = {group for group in self._groups.values() if not group.users.issubset(residencies)}
        return [entry for group in groups for entry in group.entries]

    def manages(self, entries: Iterable[Entry]) -> bool:
        """Whether all of some tensors are claimed, by these very entries."""
        return all(self._entries.get(id(entry.tensor)) is entry for entry in entries)

    def release(self, entries: Iterable[Entry]) -> None:
        """Forget tensors that no residency of the owner uses any more, and unpin the regions that only they lay in. Idempotent."""
        with _OWNERS_LOCK:
            for entry in entries:
                key = id(entry.tensor)
                group = self._groups.get(key)
                if group is None or not group.users:
                    if self._owner(entry) is self:
                        del _OWNERS[key]
                    self._groups.pop(key, None)
                    self._entries.pop(key, None)
        used = {group.master.region for group in self._groups.values() if group.master is not None}
        self.host.keep(used)

    @staticmethod
    def _owner(entry: Entry) -> "ResidencyContext | None":
        reference = _OWNERS.get(id(entry.tensor))
        owner = None if reference is None else reference()
        known = None if owner is None else owner._entries.get(id(entry.tensor))  # noqa: SLF001  (of this class)
        return owner if known is not None and known.tensor is entry.tensor else None

    def _refuse_second_owner(self, entries: Iterable[Entry], asker: str) -> None:
        for entry in entries:
            if self._owner(entry) not in (None, self):
                raise OffloadStateError(
                    f"{asker}: {entry.name} is managed by another offload owner already; disable that one first, or share "
                    "the whole component with the same device and pinning"
                )

    def _known(self, placement: Placement) -> Group | None:
        """Return the group for exactly these tensors, where they are as it left them."""
        group = self._groups.get(id(placement.entries[0].tensor))
        if group is None or {*group.entries} != {*placement.entries}:
            return None
        return group if group.intact() and not group.unsure else None

    def _register(self, group: Group) -> Group:
        for entry in group.entries:
            former = self._groups.get(id(entry.tensor))
            if former is not None:
                former.supersede()
            self._groups[id(entry.tensor)] = group
        return group

    # ---- masters -----------------------------------------------------------------------------------------------------------

    def _adopt_mapped(self, fresh: deque[Fresh], checkpoint: Checkpoint, *, keep_origin: bool) -> None:
        """Give groups whose bytes stand in a file their masters there, and take them out; what they came from is freed on the way."""
        checkpoint.look_again()
        masters = [group.master for group in self._groups.values() if group.master is not None]
        taken = {(master.region, master.offset) for master in masters if isinstance(master.region, MappedFile)}
        for _ in range(len(fresh)):
            group, placement = fresh.popleft()
            found = checkpoint.find(placement, self.accelerator.to_host(placement.raw()), taken)
            if isinstance(found, str):
                group.unmapped = found
                fresh.append((group, placement))
            else:
                self.host.attach(checkpoint)
                taken.add(found)
                file, at = found
                _adopt_one(group, placement, master_of(placement, file.slice(at, placement.nbytes), file, at), keep_origin=keep_origin)
            del placement  # it keeps the memory that the weights came from
        self.host.lock_files()

    def _adopt(self, fresh: deque[Fresh], *, keep_origin: bool, pin_from: int | None) -> None:
        """Give groups their masters, region by region, so that what the weights came from is freed on the way."""
        total = 0
        for _, placement in fresh:
            total = next_offset(placement, total) + placement.nbytes
        pin = pin_from is not None and total >= pin_from
        room = self.host.room
        if pin and pin_from != LATE_PIN_BYTES and room is not None and PinnedMemory.cost(self.accelerator, total) > room:
            self.host.reserve_staging()
        while fresh:
            if not pin or not self._adopt_pinned(fresh, keep_origin=keep_origin):
                group, placement = fresh.popleft()
                with torch.inference_mode(mode=False):
                    raw = self.accelerator.to_host(placement.raw())  # the memory itself, where it is on the host
                _adopt_one(group, placement, master_of(placement, raw), keep_origin=keep_origin)

    def _adopt_pinned(self, fresh: deque[Fresh], *, keep_origin: bool) -> bool:
        """Take groups off the front as long as one region holds them; none (False) where there is no room for the first."""
        room, offsets, end = self.host.room, list[int](), 0
        for _, placement in fresh:
            at = next_offset(placement, end)
            after = at + placement.nbytes
            if (offsets and after > _REGION_BYTES) or (room is not None and PinnedMemory.cost(self.accelerator, after) > room):
                break
            offsets.append(at)
            end = after
        region = self.host.pin(end)
        if region is None:
            return False
        for at in offsets:
            group, placement = fresh.popleft()
            master = master_of(placement, region.slice(at, placement.nbytes), region, at)
            with torch.inference_mode(mode=False):
                self.accelerator.to_host(placement.raw(), master.raw)
            _adopt_one(group, placement, master, keep_origin=keep_origin)
        return True

    def close(self) -> None:
        """Free the slots that nobody uses, and unpin everything. Idempotent; blocks the host until queued copies are done."""
        self.slots.let_go()
        self.host.close()


def _adopt_one(group: Group, placement: Placement, master: HostMaster, *, keep_origin: bool) -> None:
    if placement.device.type != "cpu":
        group.found_bytes = placement.nbytes
        group.origin = tuple(entry.tensor.data for entry in group.entries) if keep_origin else None
    group.adopt(master)
