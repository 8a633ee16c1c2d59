"""The residency of one streamed block: its weights travel to a slot, where they are bound while the block runs."""

from collections.abc import Iterable, Sequence

from typing_extensions import override

from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.device import DeviceCopy
from omni_offload.residency.group import Group
from omni_offload.residency.managed import Counters, unwatched
from omni_offload.residency.module import ModuleResidency
from omni_offload.residency.partition import Partition
from omni_offload.residency.slots import Slot
from omni_offload.residency.tensors import Entry, align
from omni_offload.residency.transfer import copy_in

__all__ = ["BlockResidency"]


class BlockResidency(ModuleResidency):
    """The tensors that travel with one block.

    Attributes:
        index: The block's place in execution order.
        module: The block.
        slot: Where its weights lie, or are on their way to.

    Args:
        partition: The component's blocks, and which tensors travel with which.
        index: The block's place in execution order.
        context: What it shares with the other blocks and the rest of the component.
        counters: Where its copies are counted: the component's.
    """

    def __init__(self, partition: Partition, index: int, context: ResidencyContext, counters: Counters) -> None:
        self.index = index
        self.slot: Slot | None = None
        self._partition = partition
        self._moved_in: Sequence[Group] | None = None
        self._copies: dict[Slot, tuple[Sequence[Group], list[DeviceCopy]]] = {}
        name, self.module = partition.blocks[index]
        super().__init__(self.module, context.accelerator.device, name=name, context=context)
        self.counters = counters

    @override
    def _select(self, entries: list[Entry]) -> list[Entry]:
        return self._partition.of_block(self.index, entries)

    def reselect(self) -> None:
        """Group the tensors anew: which travel with the block may have changed."""
        with self._lock, unwatched():
            if self._groups is None:
                self._collect()
                self._measure()
            else:
                self.leave()
                self._regroup()

    @override
    def _regroup(self, *, pin_from: int | None = 1) -> None:
        super()._regroup(pin_from=pin_from)  # what is copied in every step is worth pinning, however small

    @property
    def current(self) -> bool:
        """Whether a slot holds the weights as their masters are now, landed or on their way."""
        with self._lock, unwatched():
            return self.slot is not None and all(group.current() for group in self._groups or ())

    def fetch_into(self, slot: Slot) -> None:
        """Queue the copy of the weights into a slot, after all that runs on what was in it; the host does not block (pinned masters)."""
        with self._lock, unwatched():
            groups = self._groups or []
            if self.slot is not slot or self._moved_in is not groups:
                self.leave()
                self.slot, slot.tenant = slot, self
                self._move_in(slot, groups)
            if (recorder := self._accelerator.recorder) is not None:
                recorder.copies_for(self.name)
            self.counters.bytes_in += copy_in(groups, self._accelerator, self._context)

    def _move_in(self, slot: Slot, groups: Sequence[Group]) -> None:
        known, copies = self._copies.get(slot, (None, []))
        if known is not groups:
            copies = self._make_copies(slot, groups)
        for group, copy in zip(groups, copies, strict=True):
            slot.take(group, copy.offset, 0)
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

    def leave(self) -> None:
        """Leave the slot; the weights must not be bound to it."""
        with self._lock:
            self.drop()
            slot, self.slot = self.slot, None
            if slot is not None and slot.tenant is self:
                slot.tenant = None

    def forget_slots(self) -> None:
        """Leave the slot, and keep nothing of any."""
        self.leave()
        self._copies.clear()

    @override
    def _await_landing(self, groups: Iterable[Group]) -> None:
        """Nothing to wait for: the component waits, once, when it is done."""
