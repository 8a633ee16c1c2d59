"""Groups that one block alone uses, as flat lists: one pass tells of edits, one binds all tensors, and their bytes are one copy.

What cannot be done so (a tensor was written on the device, or moved meanwhile; a second residency knows a group; a repair) is done
group by group: `part` gives each group a binding of its own, as it is at that moment. An interrupt may land on any line: `part` can
be repeated.
"""

from collections.abc import Iterable, Sequence

import torch
from typing_extensions import override

from omni_offload.accelerator import PinnedMemory
from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.device import DeviceCopy
from omni_offload.residency.group import Binding, Group
from omni_offload.residency.host import HostMaster
from omni_offload.residency.mapped import MappedFile
from omni_offload.residency.slots import Layout, Slot
from omni_offload.residency.tensors import Shapes, align, shape_of

__all__ = ["Bundle"]

_WORD = 8


class Bundle(Binding):
    """The binding that the groups of one block have in common while it is their only user.

    Callers have torch functions of subclasses disabled.

    Attributes:
        groups: The groups; each has a master, and no device copy.
        formed: Whether they have it in common.

    Args:
        groups: As the attribute.
        user: Whose they are.
    """

    def __init__(self, groups: Sequence[Group], user: object) -> None:
        super().__init__()
        self.groups = groups
        self.formed = False
        self._user = user
        self._slot: Slot | None = None
        self._filled = False
        self._tensors = [tensor for group in groups for tensor in group.tensors]
        self._counters = [tensor for group in groups for tensor in group.counters]
        self._suspects = [entry for group in groups for entry in group.suspects]
        masters = [group.master for group in groups if group.master is not None]
        self._home = tuple(view for master in masters for view in master.views)
        self._shapes = Shapes(self._home)
        self._versions: list[int] = []
        self._samples = _Samples(masters)
        self._places: dict[Group, tuple[int, int, int]] = {}
        self._sources: list[tuple[torch.Tensor, bool]] = []
        self._layout = self._arrange()

    @staticmethod
    def fits(groups: Sequence[Group], user: object) -> bool:
        """Whether some groups can be one: nobody else knows them, each has a master, nothing is bound, begun or marked."""
        return bool(groups) and all(
            group.users == {user}
            and group.master is not None
            and not (group.superseded or group.bound or group.unsure or group.holders or group.marked)
            for group in groups
        )

    def _arrange(self) -> Layout:
        """Find each group's place in a slot, and what is copied from where: one copy where neighbours are neighbours in the arena."""
        at, tensor_at, counter_at, places, runs, moved = 0, 0, 0, list[int](), list[tuple[int, int]](), list[tuple[Group, HostMaster]]()
        for group in self.groups:
            self._places[group] = (at, tensor_at, counter_at)
            places += [at + offset for offset in group.offsets]
            if group.nbytes and moved and _displacement(moved[-1][0], self._places) == _displacement(group, self._places) is not None:
                runs[-1] = runs[-1][0], at + group.nbytes - runs[-1][0]
            elif group.nbytes and group.master is not None:
                runs.append((at, group.nbytes))
                moved.append((group, group.master))
            at, tensor_at, counter_at = at + align(group.nbytes), tensor_at + len(group.tensors), counter_at + len(group.counters)
        copies = sorted(zip(moved, runs, strict=True), key=lambda copy: copy[0][1].pinned)
        self._sources = [(_bytes_of(master, group.nbytes, nbytes), master.pinned) for (group, master), (_, nbytes) in copies]
        return Layout.of(zip(places, self._home, strict=True), [run for _, run in copies])

    def form(self) -> None:
        """Let the groups have their binding in common."""
        for group in self.groups:
            group.binding = self
        self.formed = True

    @override
    def part(self) -> None:
        self.formed = False
        for group in self.groups:
            if group.binding is self:
                own = Binding(holders={*self.holders}, bound={*self.bound}, unsure=self.unsure)
                own.copy = self.copy_of(group)
                group.binding = own

    @override
    def copy_of(self, group: Group) -> DeviceCopy | None:
        slot = self._slot
        if slot is None or slot.raw is None:
            return None
        at, tensor_at, counter_at = self._places[group]
        copy = DeviceCopy(slot.take(group, at, group.nbytes), slot, at)  # without a fingerprint: its master is read again
        copy.versions = self._versions[counter_at : counter_at + len(group.counters)]
        if self._layout in slot.views:
            views = slot.views[self._layout].tensors[tensor_at : tensor_at + len(group.tensors)]
            copy.views = views, tuple(map(shape_of, views))
        return copy

    # ---- device ------------------------------------------------------------------------------------------------------------

    def move_in(self, slot: Slot) -> None:
        """Take room in a slot; the bytes are not there yet."""
        self._filled, self._slot = False, slot
        self.holders.add(self._user)

    def move_out(self) -> None:
        """Leave the slot; nothing is bound to it."""
        self._filled, self._slot = False, None
        self.holders.discard(self._user)

    def forget(self) -> None:
        """Count the device copy as stale."""
        self._filled = False

    def copy_in(self, slot: Slot, context: ResidencyContext) -> int:
        """Queue the copy into the slot, after all that used what was there; the host does not block (pinned masters).

        Returns:
            Bytes on their way.
        """
        self._filled = False
        slot.order_after_uses()
        total = 0
        for (source, pinned), target in zip(self._sources, slot.targets_of(self._layout), strict=True):
            context.host.copy(target, source, pinned=pinned)
            total += source.numel()
        slot.ready = context.accelerator.record_copies()
        self._versions = self._count()
        self._samples.take()
        self._filled = True
        return total

    def current(self) -> bool:
        """Whether the device copy is of the masters as they are now, by version counters."""
        return self._filled and self._versions == self._count()

    def intact(self) -> bool:
        """Whether every tensor is bound to its master, as it was left."""
        return self._shapes.fit(self._tensors)

    def at_home(self) -> bool:
        """Whether every tensor is where its master is (a cast moves it); less than `intact` tells, in a third of the time."""
        return self._shapes.are_at(self._tensors)

    def check(self) -> None:
        """Count the device copy as stale where sampled values of the masters are others than at the copy (`.data` edits)."""
        if self._filled and not self._samples.unchanged():
            self._filled = False

    def _count(self) -> list[int]:
        return [tensor._version for tensor in self._counters]  # noqa: SLF001  (the counter has no public name)

    def bind(self) -> bool:
        """Bind every tensor to a copy that is `current`; returns False, with nothing done, where it has to be done group by group."""
        slot = self._slot
        if slot is None or not self._filled or self.bound or self.unsure:
            return False
        views = slot.views_of(self._layout, self._home)
        self.unsure = True
        self.bound.add(self._user)
        for tensor, view in zip(self._tensors, views.tensors, strict=True):
            tensor.data = view
        self.unsure = False
        return True

    def unbind(self) -> bool:
        """Bind every tensor to its master again; returns False, with nothing done, where it has to be done group by group."""
        slot = self._slot
        if slot is None or self.unsure or self._versions != self._count():
            return False
        if slot.views_of(self._layout, self._home).addresses != [tensor.data_ptr() for tensor in self._tensors]:
            return False
        if self._suspects and any(entry.always_written() for entry in self._suspects):
            return False
        self.unsure = True
        for tensor, view in zip(self._tensors, self._home, strict=True):
            tensor.data = view
        self.unsure = False
        self.bound.discard(self._user)
        return True


def _displacement(group: Group, places: dict[Group, tuple[int, int, int]]) -> tuple[PinnedMemory | MappedFile, int] | None:
    """Return how far a group is from its place in a slot; groups for which it is the same can travel together."""
    master = group.master
    return None if master is None or master.region is None else (master.region, master.offset - places[group][0])


def _bytes_of(master: HostMaster, own: int, nbytes: int) -> torch.Tensor:
    """Return so many bytes from a master's first on: its own, or with those that follow it in the arena."""
    if nbytes == own or master.region is None:
        return master.raw
    return master.region.raw[master.offset : master.offset + nbytes]


class _Samples:
    """Sampled values of masters, as they were at the copy: those in a pinned region are read in one go, into memory that is there.

    A sample is a whole word of the region that touches the master; what it holds of a neighbour does no harm.
    """

    def __init__(self, masters: Iterable[HostMaster]) -> None:
        self._alone: list[HostMaster] = []
        self._others: list[list[int] | None] = []
        places: dict[PinnedMemory | MappedFile, list[int]] = {}
        for master in masters:
            region = master.region
            if region is None or master.offset + master.raw.numel() > region.nbytes // _WORD * _WORD:
                self._alone.append(master)
            else:
                places.setdefault(region, []).extend(sorted({(master.offset + place) // _WORD for place in master.sampled}))
        with torch.inference_mode(mode=False):
            self._regions = [
                (region.raw[: region.nbytes // _WORD * _WORD].view(torch.int64), torch.tensor(words)) for region, words in places.items()
            ]
            self._then = [torch.zeros_like(words) for _, words in self._regions]
            self._now = [torch.zeros_like(words) for _, words in self._regions]

    def take(self) -> None:
        """Note the values as they are now."""
        self._read(self._then)
        if self._alone:
            self._others = [master.fingerprint() for master in self._alone]

    def unchanged(self) -> bool:
        """Whether the values are as they were noted."""
        self._read(self._now)
        return all(map(torch.equal, self._now, self._then)) and self._others == [master.fingerprint() for master in self._alone]

    def _read(self, into: Sequence[torch.Tensor]) -> None:
        for (words, places), values in zip(self._regions, into, strict=True):
            torch.index_select(words, 0, places, out=values)
