"""One group of tensors that share bytes: its host master, its device copy, and which of the two its tensors are bound to.

An interrupt may land on any line: `unsure` is set before bindings change and cleared after, and every step can be repeated.
"""

import contextlib
from collections.abc import Iterable

import attrs
import torch

from omni_offload.residency.device import DeviceBuffer, DeviceCopy
from omni_offload.residency.host import HostMaster
from omni_offload.residency.tensors import Entry, Placement, is_shaped, view_of

__all__ = ["Binding", "Group"]


@attrs.define(eq=False)
class Binding:
    """Which of host and device the tensors of a group are bound to, and for whom; groups that move as one have it in common.

    Attributes:
        holders: Residencies that hold the device copy.
        bound: Those that have the tensors bound to it. Two components that share a group nest.
        unsure: Whether a change of binding was begun and not finished.
        copy: The device copy.
    """

    holders: set[object] = attrs.field(factory=set)
    bound: set[object] = attrs.field(factory=set)
    unsure: bool = False
    copy: DeviceCopy | None = None

    def copy_of(self, group: "Group") -> DeviceCopy | None:  # noqa: ARG002  (several groups may have it in common)
        """Return the device copy of a group that has this binding; None where there is none."""
        return self.copy

    def part(self) -> None:
        """Give each of several groups that have it in common a binding of its own, as it is now. Idempotent."""


class Group:
    """Tensors that share bytes. Callers have torch functions of subclasses disabled.

    Attributes:
        users: Residencies that know the group.
        binding: What its tensors are bound to.
        written: Whether what is bound counts as written, so that it is copied back when the last user lets go.
        tensors: The tensor objects of its entries.
        offsets: Where in the group's bytes each lies.
        counters: The tensors whose version counters tell of a write to them.
        suspects: The entries that may be written without one.
        marked: Whether a tensor is conjugated or negated by a mark alone, which torch computes when it is read.
        superseded: Whether its tensors were grouped anew; residencies that know it regroup.
        found_bytes: Bytes that were copied from the device when the group was made, because the weights were found there.
        origin: What the tensors were bound to before, where an undo may have to put it back.
        unmapped: Why its bytes are not those of a mapped file, where there is one; empty where they are.
    """

    def __init__(self, placement: Placement) -> None:
        self.entries: tuple[Entry, ...] = placement.entries
        self.nbytes = placement.nbytes
        self.found_bytes = 0
        self.origin: tuple[torch.Tensor, ...] | None = None
        self.master: HostMaster | None = None
        self.users: set[object] = set()
        self.binding = Binding()
        self.written = False
        self.superseded = False
        self.unmapped = ""
        self.offsets = placement.offsets
        self.tensors = [entry.tensor for entry in self.entries]
        self.counters = [tensor for entry in self.entries for tensor in entry.counters]
        self.suspects = [entry for entry in self.entries if not entry.counters or entry.buffer_of is not None]
        self.marked = any(tensor.is_conj() or tensor.is_neg() for tensor in self.tensors)

    @property
    def holders(self) -> set[object]:
        """Residencies that hold the device copy."""
        return self.binding.holders

    @property
    def bound(self) -> set[object]:
        """Residencies that have the tensors bound to the device copy."""
        return self.binding.bound

    @property
    def unsure(self) -> bool:
        """Whether a change of binding was begun and not finished."""
        return self.binding.unsure

    @unsure.setter
    def unsure(self, value: bool) -> None:
        self.binding.unsure = value

    @property
    def copy(self) -> DeviceCopy | None:
        """The device copy; None where there is none."""
        return self.binding.copy_of(self)

    @copy.setter
    def copy(self, copy: DeviceCopy | None) -> None:
        self.binding.copy = copy

    @property
    def place_in_file(self) -> int:
        """Where in a mapped file its bytes are: neighbours there are to be neighbours on the device; -1 where they are in none."""
        return self.master.offset if self.master is not None and self.master.mapped else -1

    def add_user(self, user: object) -> None:
        """Note that a residency knows the group. One that is known to a second one has nothing in common with others."""
        if user not in self.users:
            self.binding.part()
        self.users.add(user)

    def supersede(self) -> None:
        """Note that its tensors are grouped anew; it has nothing in common with others any more."""
        self.binding.part()
        self.superseded = True

    # ---- host ------------------------------------------------------------------------------------------------------------

    def adopt(self, master: HostMaster) -> None:
        """Make given bytes the master and bind every tensor to them."""
        self.unsure = True
        self.master = master
        self._bind_to(master.views)

    def move_master(self) -> None:
        """Make a copy of the master's bytes, in ordinary memory, the master. The host copies."""
        if self.master is not None:
            with torch.inference_mode(mode=False):
                raw = self.master.raw.clone()
            pairs = zip(self.tensors, self.offsets, strict=True)
            self.adopt(HostMaster(raw, tuple(view_of(raw, at, tensor) for tensor, at in pairs)))

    def intact(self) -> bool:
        """Whether every tensor is bound to the master, as it was left."""
        master = self.master
        return master is not None and not self.superseded and all(map(is_shaped, self.tensors, master.shapes))

    def as_bound(self) -> bool:
        """Whether every tensor is where the group bound it: at the device copy, or else at the master."""
        if not self.bound or self.copy is None:
            return self.intact()
        return all(self.copy.here(self.tensors))

    def repair(self) -> None:
        """Finish a binding to the master that an interrupt cut short; what the user has moved is left alone."""
        if self.unsure and not self.bound and self.master is not None:
            self._bind_to(self.master.views)

    def back_to_origin(self) -> None:
        """Bind the tensors to what they were bound to before the group was made, where that was kept."""
        if self.origin is not None:
            self._bind_to(self.origin)

    def _bind_to(self, views: Iterable[torch.Tensor]) -> None:
        """Bind every tensor object to a view; the objects and their version counters stay."""
        self.unsure = True
        with self._binding_mode():
            for tensor, view in zip(self.tensors, views, strict=False):
                tensor.data = view
        self.unsure = False

    def _binding_mode(self) -> contextlib.AbstractContextManager[object]:
        """Return what to bind tensors under: in inference mode torch would compute a conjugated one before it lets go of it."""
        return torch.inference_mode(mode=False) if self.marked else contextlib.nullcontext()

    # ---- device ----------------------------------------------------------------------------------------------------------

    @property
    def placed(self) -> bool:
        """Whether the group has room on the device, filled or not."""
        return self.copy is not None and self.copy.buffer.raw is not None

    def room_beside(self, slot: DeviceBuffer | None) -> bool:
        """Whether the group has room on the device that lasts: none in a slot but a given one, unless it is in use there."""
        return self.placed and self.copy is not None and (self.copy.buffer is slot or not self.copy.buffer.passing or bool(self.bound))

    def place(self, buffer: DeviceBuffer, offset: int) -> None:
        """Give the group room on the device; its bytes are not there yet."""
        self.copy = DeviceCopy(buffer.take(self, offset, self.nbytes), buffer, offset)

    def remember(self) -> None:
        """Note what the master is, as of now, for `current`."""
        if self.copy is not None and self.master is not None:
            self.copy.versions = self._versions()
            self.copy.fingerprint = self.master.fingerprint()

    def forget(self) -> None:
        """Count the device copy as stale."""
        if self.copy is not None:
            self.copy.fingerprint = None

    def current(self) -> bool:
        """Whether the device copy equals the master, by versions and sampled values."""
        copy, master = self.copy, self.master
        if copy is None or master is None or not self.placed or copy.fingerprint is None:
            return False
        return copy.versions == self._versions() and copy.fingerprint == master.fingerprint()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.counters]  # noqa: SLF001  (the counter has no public name)

    def bind(self, user: object) -> None:
        """Bind every tensor to the device copy, for one more user."""
        copy, master = self.copy, self.master
        if copy is None or master is None:
            raise RuntimeError("a group without a device copy cannot be bound to it")
        if not self.bound:
            versions = self._versions()
            if versions != copy.versions:  # the master was edited since the copy
                copy.fingerprint = None
                copy.versions = versions
        elif not self.unsure:
            self.bound.add(user)
            return
        views = self.views_on(copy)
        self.unsure = True
        self.bound.add(user)
        self._bind_to(views)

    def views_on(self, copy: DeviceCopy) -> tuple[torch.Tensor, ...]:
        """Return what the tensors are bound to where they are bound to a device copy; made once."""
        if copy.views is not None or self.master is None:
            return () if copy.views is None else copy.views[0]
        return copy.make_views(self.master.views, self.offsets)

    def unbind(self, user: object, *, force: bool = False, copy_back: bool = False) -> int:
        """Let go of the device copy for one user; with the last, bind the tensors to the master again.

        What was written on the device is copied to the master first. A tensor that was moved to other memory meanwhile
        (`.to(dtype)`, `.data = ...`) is left alone; the residency regroups it.

        Args:
            user: Who bound it.
            force: Repair: also where the user is not known, and where an interrupt left the tensors half bound.
            copy_back: Copy back whether written or not.

        Returns:
            Bytes copied to the host; the host blocks for them.
        """
        bound = self.bound
        if user not in bound and not (force and not bound):
            return 0
        moved = 0
        if len(bound) <= 1 and self.master is not None and self.copy is not None:
            moved = self._to_master(self.master, self.copy, copy_back=copy_back or self.written)
            self.written = False
        bound.discard(user)
        return moved

    def _to_master(self, master: HostMaster, copy: DeviceCopy, *, copy_back: bool) -> int:
        here = copy.here(self.tensors)
        if True not in here:
            if self.intact():
                self.unsure = False
            else:
                copy.fingerprint = None
            return 0
        versions = self._versions()
        written = copy_back or versions != copy.versions or (self.suspects and any(e.always_written() for e in self.suspects))
        if written:
            copy.fingerprint = None
            copy.buffer.accelerator.to_host(copy.raw, master.raw)
        self.unsure = True
        with self._binding_mode():
            for tensor, view, is_here in zip(self.tensors, master.views, here, strict=False):
                if is_here:
                    tensor.data = view
        self.unsure = False
        copy.versions = versions
        if False in here:
            copy.fingerprint = None
        elif written:
            copy.fingerprint = master.fingerprint()
        return self.nbytes if written else 0

    def hold(self, holder: object) -> None:
        """Keep the device copy for one more residency."""
        self.holders.add(holder)

    def drop(self, holder: object) -> None:
        """Let go of the device copy for one residency, and of its memory with the last, in the order of the copy stream."""
        self.holders.discard(holder)
        if self.copy is not None and not self.holders and not self.bound:
            self.copy.buffer.give_back(self)
            self.copy = None
