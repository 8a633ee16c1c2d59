"""The residency of one streamed block: its weights travel to a slot, where they are bound while the block runs."""

from collections.abc import Iterable, Sequence

from typing_extensions import override

from omni_offload.residency.bundle import Bundle
from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.counters import Counters
from omni_offload.residency.device import DeviceCopy
from omni_offload.residency.group import Group
from omni_offload.residency.managed import unwatched
from omni_offload.residency.mapped import Checkpoint
from omni_offload.residency.module import ModuleResidency
from omni_offload.residency.partition import Partition
from omni_offload.residency.slots import Slot
from omni_offload.residency.tensors import Entry, Placements, align
from omni_offload.residency.transfer import copy_in

__all__ = ["BlockResidency"]


class BlockResidency(ModuleResidency):
    """The tensors that travel with one block.

    Attributes:
        index: The block's place in execution order.
        module: The block.
        slot: Where its weights lie, or are on their way to.
        ahead: Whether it was fetched before it was needed, and has not run since.

    Args:
        partition: The component's blocks, and which tensors travel with which.
        index: The block's place in execution order.
        context: What it shares with the other blocks and the rest of the component.
        counters: Where its copies are counted: the component's.
    """

    def __init__(self, partition: Partition, index: int, context: ResidencyContext, counters: Counters) -> None:
        self.index = index
        self.slot: Slot | None = None
        self.ahead = False
        self._partition = partition
        self._bundle: Bundle | None = None
        self._one_by_one: Sequence[Group] | None = None
        self._moved_in: Sequence[Group] | None = None
        self._copies: dict[Slot, tuple[Sequence[Group], list[DeviceCopy]]] = {}
        name, self.module = partition.blocks[index]
        super().__init__(self.module, context.accelerator.device, name=name, context=context)
        self.counters = counters

    @override
    def _select(self, entries: list[Entry]) -> list[Entry]:
        self._selected = self._partition.changes
        return self._partition.of_block(self.index, entries)

    @property
    @override
    def _checkpoint(self) -> Checkpoint | None:
        return self._partition.checkpoint

    @override
    def _settled(self) -> bool:
        return self._selected == self._partition.changes and super()._settled()

    @override
    def prepare(self, *, keep_origin: bool = False, placements: Placements | None = None) -> None:
        self._prepare(keep_origin=keep_origin, placements=placements)

    @property
    def to_place(self) -> Sequence[Entry]:
        """The tensors that `prepare` groups; none where it does not."""
        return self._entries if self._groups is None else ()

    def reselect(self, placements: Placements | None = None) -> None:
        """Group the tensors anew: which travel with the block may have changed.

        Args:
            placements: Where the tensors are, if that is known.
        """
        with self._lock, unwatched():
            if self._groups is None:
                self._collect()
                self._measure()
            else:
                self.leave()
                self._regroup(placements=placements)

    @override
    def _regroup(self, *, pin_from: int | None = 1, placements: Placements | None = None) -> None:
        super()._regroup(pin_from=pin_from, placements=placements)  # what is copied in every step is worth pinning, however small

    @override
    def _set_groups(self, groups: list[Group]) -> None:
        self._part()
        super()._set_groups(groups)

    def _part(self) -> None:
        """From here on the groups are looked at one by one, until the block moves into a slot again."""
        if self._bundle is not None:
            self._bundle.part()
            self._bundle = None

    def strayed(self) -> bool:
        """Whether a tensor was moved to other memory since they were grouped, or its bytes are another residency's too."""
        with self._lock, unwatched():
            bundle = self._bundle
            if bundle is not None and bundle.formed:
                return not (bundle.bound or bundle.intact())
            groups = self._groups or ()
            return not any(self in group.bound for group in groups) and (any(len(group.users) > 1 for group in groups) or self._moved())

    def take_in(self) -> None:
        """Group the tensors anew, out of the slot, if one was moved to other memory since the pass began: by a cast within a call."""
        with self._lock, unwatched():
            bundle = self._bundle
            moved = not bundle.at_home() if bundle is not None and bundle.formed else self._moved()
            if moved:
                self.evict()
                self._regroup()

    @property
    def bound(self) -> bool:
        """Whether the weights are bound to their device copy: the block runs."""
        bundle = self._bundle
        if bundle is not None and bundle.formed:
            return bool(bundle.bound)
        return any(self in group.bound for group in self._groups or ())

    @property
    def current(self) -> bool:
        """Whether a slot holds the weights as their masters are now, landed or on their way; by version counters alone, if it can."""
        with self._lock, unwatched():
            if self._bundle is not None and self._bundle.formed:
                return self._bundle.current()
            return self._in_place() and all(group.bound or group.current() for group in self._groups or ())

    def _in_place(self) -> bool:
        """Whether every group has room on the device: in the slot, or where another residency holds it."""
        return self.slot is not None and all(group.room_beside(self.slot) for group in self._groups or ())

    def check(self) -> None:
        """Count the device copy as stale if the masters were edited in a way that no version counter tells. Once a pass."""
        with self._lock, unwatched():
            if self._bundle is not None:
                self._bundle.check()

    def fetch_into(self, slot: Slot) -> None:
        """Queue the copy of the weights into a slot, after all that runs on what was in it; the host does not block (pinned masters)."""
        with self._lock, unwatched():
            groups = self._groups or []
            if self._bundle is not None and not self._bundle.formed:
                self._part()  # another residency knows one of them since
            if self.slot is not slot or self._moved_in is not groups or not (self._bundle or self._in_place()):
                self.leave()
                self.slot, slot.tenant = slot, self
                self._move_in(slot, groups)
            if (recorder := self._accelerator.recorder) is not None:
                recorder.copies_for(self.name)
            if self._bundle is not None:
                self.counters.bytes_in += self._bundle.copy_in(slot, self._context)
            else:
                self.counters.bytes_in += copy_in([group for group in groups if not group.bound], self._accelerator, self._context)

    def _move_in(self, slot: Slot, groups: Sequence[Group]) -> None:
        if self._bundle is None and self._one_by_one is not groups and Bundle.fits(groups, self):
            self._bundle = Bundle(groups, self)  # before it is formed, so that an interrupt is undone
            self._bundle.form()
        if self._bundle is not None:
            self._bundle.move_in(slot)
        else:
            known, copies = self._copies.get(slot, (None, []))
            if known is not groups:
                copies = self._make_copies(slot, groups)
            for group, copy in zip(groups, copies, strict=True):
                if not group.room_beside(slot):
                    group.copy = copy
                group.hold(self)
        self._moved_in = groups

    def _make_copies(self, slot: Slot, groups: Sequence[Group]) -> list[DeviceCopy]:
        """Make the device side of every group for a slot, once: in steady state nothing is allocated."""
        offset, copies = 0, []
        for group in groups:
            copies.append(DeviceCopy(slot.take(group, offset, group.nbytes), slot, offset))
            offset += align(group.nbytes)
        self._copies = {one: made for one, made in self._copies.items() if one.raw is not None and made[0] is groups}
        self._copies[slot] = groups, copies
        return copies

    @override
    def bind(self) -> None:
        with self._lock, unwatched():
            if self._bundle is not None and self._bundle.formed and self.slot is not None:
                self._await([self.slot.ready])
                if self._bundle.bind():
                    self._follow()
                    return
                self._part()
            super().bind()

    @override
    def unbind(self, *, force: bool = False, copy_back: bool = False) -> None:
        with self._lock, unwatched():
            bundle = self._bundle
            if bundle is not None and bundle.formed and bundle.bound and self.slot is not None and not (force or copy_back):
                self.slot.uses.update(self._uses())
                if bundle.unbind():
                    self._follow()
                    return
                self._one_by_one = bundle.groups  # what writes its weights once may do so in every step
            self._part()
            super().unbind(force=force, copy_back=copy_back)

    @override
    def mark_written(self) -> None:
        self._part()
        super().mark_written()

    @override
    def forget_copies(self) -> None:
        with self._lock:
            if self._bundle is not None:
                self._bundle.forget()
            else:
                super().forget_copies()

    @override
    def drop(self) -> None:
        with self._lock, unwatched():
            bundle, self._moved_in = self._bundle, None
            if bundle is not None and bundle.formed and not bundle.bound:
                bundle.move_out()
            else:
                self._part()
                super().drop()

    def leave(self) -> None:
        """Leave the slot; the weights must not be bound to it."""
        with self._lock:
            self.drop()
            slot, self.slot = self.slot, None
            if slot is not None and slot.tenant is self:
                slot.tenant = None

    def evict(self) -> None:
        """Leave the slot to another, or for good; a copy that nothing ran on was made for nothing."""
        self.counters.wasted_copies += self.ahead
        self.ahead = False
        self.leave()

    def forget_slots(self) -> None:
        """Leave the slot, and keep nothing of any."""
        self.evict()
        self._copies.clear()

    @override
    def _await_landing(self, groups: Iterable[Group]) -> None:
        """Nothing to wait for: the component waits, once, when it is done."""
