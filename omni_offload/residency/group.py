"""One group of tensors that share bytes: its host master, its device copy, and which of the two its tensors are bound to."""

from collections.abc import Iterable

import attrs
import torch

from omni_offload.accelerator import Accelerator
from omni_offload.residency.host import ByteMeter, HostMaster
from omni_offload.residency.tensors import Entry, Placement, view_of

__all__ = ["DeviceBuffer", "DeviceCopy", "Group", "Shape"]

#: What tells that a tensor is still the view it was bound to.
Shape = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device]


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return what tells one binding of a tensor object from another."""
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), tensor.device


class DeviceBuffer:
    """One device allocation that some groups' copies lie in, and the events that guard it.

    Attributes:
        raw: The bytes, uint8, owned by the copy stream.
        ready: Fires when the last copy into it has landed; every stream that uses it waits for it.
        uses: Per stream, the event after its last use; the copy stream waits for them before the bytes are written or freed.
    """

    def __init__(self, accelerator: Accelerator, nbytes: int, meter: ByteMeter) -> None:
        self._accelerator = accelerator
        self._meter = meter
        self._slices = 0
        self.nbytes = nbytes
        self.raw: torch.Tensor | None = accelerator.allocate(nbytes)
        meter.add(nbytes)
        self.ready: torch.Event | None = None
        self.uses: dict[int, torch.Event] = {}

    def slice(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a group's bytes; the buffer is freed after as many calls of `free_slice`."""
        if self.raw is None:
            raise RuntimeError("the device buffer was freed")
        self._slices += 1
        return self.raw[offset : offset + nbytes]

    def order_after_uses(self) -> None:
        """Let the copy stream wait for every stream that used the bytes. The host does not block."""
        for event in self.uses.values():
            self._accelerator.after(event)
        self.uses.clear()

    def free_slice(self) -> None:
        """Let go of one slice, and of the memory with the last."""
        self._slices -= 1
        if self._slices <= 0:
            self.free()

    def free(self) -> None:
        """Let go of the memory, in the order of the copy stream. Idempotent."""
        if self.raw is not None:
            self.order_after_uses()
            self.raw = None
            self._meter.remove(self.nbytes)


@attrs.define(eq=False)
class DeviceCopy:
    """A group's bytes on the device, and what the master was when they were copied."""

    raw: torch.Tensor
    views: tuple[torch.Tensor, ...]
    buffer: DeviceBuffer
    offset: int
    shapes: tuple[Shape, ...] = attrs.field(init=False)
    versions: list[int] = attrs.field(factory=list, init=False)
    fingerprint: list[int] | None = attrs.field(default=None, init=False)

    @shapes.default
    def _make_shapes(self) -> tuple[Shape, ...]:
        return tuple(shape_of(view) for view in self.views)


class Group:
    """Tensors that share bytes.

    Attributes:
        users: Residencies that know the group.
        holders: Those that hold its device copy.
        bound: Those that have its tensors bound to the device copy. Two components that share a group nest.
        found_bytes: Bytes that were copied from the device when the group was made, because the weights were found there.
        origin: What the tensors were bound to before, where an undo may have to put it back.
    """

    def __init__(self, placement: Placement) -> None:
        self.entries: tuple[Entry, ...] = placement.entries
        self.offsets = placement.offsets
        self.nbytes = placement.nbytes
        self.found_bytes = 0
        self.origin: tuple[torch.Tensor, ...] | None = None
        self.master: HostMaster | None = None
        self.copy: DeviceCopy | None = None
        self.users: set[object] = set()
        self.holders: set[object] = set()
        self.bound: set[object] = set()
        self._shapes: tuple[Shape, ...] = ()
        self._binding = False

    # ---- host ------------------------------------------------------------------------------------------------------------

    def adopt(self, master: HostMaster) -> None:
        """Make given bytes the master and bind every tensor to them."""
        self._binding = True
        self.master = master
        self._shapes = tuple(shape_of(view) for view in master.views)
        self._bind_to(master.views)

    def intact(self) -> bool:
        """Whether every tensor is bound to the master, as it was left."""
        pairs = zip(self.entries, self._shapes, strict=False)
        return self.master is not None and all(shape_of(entry.tensor) == shape for entry, shape in pairs)

    def as_bound(self) -> bool:
        """Whether every tensor is where the group bound it: at the device copy, or else at the master."""
        if not self.bound or self.copy is None:
            return self.intact()
        return all(shape_of(entry.tensor) == shape for entry, shape in zip(self.entries, self.copy.shapes, strict=True))

    def repair(self) -> None:
        """Finish a binding to the master that an interrupt cut short; what the user has moved is left alone."""
        if self._binding and self.master is not None:
            self._bind_to(self.master.views)

    def back_to_origin(self) -> None:
        """Bind the tensors to what they were bound to before the group was made, where that was kept."""
        if self.origin is not None:
            self._bind_to(self.origin)

    def _bind_to(self, views: Iterable[torch.Tensor]) -> None:
        """Bind every tensor object to a view; the objects and their version counters stay."""
        self._binding = True
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (a subclass must not see the binding)
            for entry, view in zip(self.entries, views, strict=True):
                entry.tensor.data = view
        self._binding = False

    # ---- device ----------------------------------------------------------------------------------------------------------

    def place(self, buffer: DeviceBuffer, offset: int) -> None:
        """Give the group room on the device; its bytes are not there yet."""
        raw = buffer.slice(offset, self.nbytes)
        pairs = zip(self.entries, self.offsets, strict=True)
        self.copy = DeviceCopy(raw, tuple(view_of(raw, at, entry.tensor) for entry, at in pairs), buffer, offset)

    def remember(self) -> None:
        """Note what the master is, as of now, for `current`."""
        if self.copy is not None and self.master is not None:
            self.copy.versions = [entry.version() for entry in self.entries]
            self.copy.fingerprint = self.master.fingerprint()

    def current(self) -> bool:
        """Whether the device copy equals the master, by versions and sampled values."""
        copy, master = self.copy, self.master
        if copy is None or master is None or copy.fingerprint is None:
            return False
        return copy.versions == [entry.version() for entry in self.entries] and copy.fingerprint == master.fingerprint()

    def bind(self, user: object) -> None:
        """Bind every tensor to the device copy, for one more user."""
        copy = self.copy
        if copy is None:
            raise RuntimeError("a group without a device copy cannot be bound to it")
        first = not self.bound
        self.bound.add(user)
        if first:
            copy.versions = [entry.version() for entry in self.entries]
            self._bind_to(copy.views)

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
        if user not in self.bound and not (force and not self.bound):
            return 0
        if self.bound - {user}:
            self.bound.discard(user)
            return 0
        moved = self._to_master(copy_back=copy_back)
        self.bound.discard(user)
        return moved

    def _to_master(self, *, copy_back: bool) -> int:
        master, copy = self.master, self.copy
        if master is None or copy is None:
            return 0
        here = [shape_of(entry.tensor) == shape for entry, shape in zip(self.entries, copy.shapes, strict=True)]
        moved = 0
        if any(here) and (copy_back or self._written(copy)):
            master.raw.copy_(copy.raw)
            moved = self.nbytes
        self._binding = True
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (as in _bind_to)
            for entry, view, is_here in zip(self.entries, master.views, here, strict=True):
                if is_here:
                    entry.tensor.data = view
        self._binding = False
        self.remember()
        return moved

    def _written(self, copy: DeviceCopy) -> bool:
        pairs = zip(self.entries, copy.versions, strict=False)
        return any(entry.always_written() or entry.version() != version for entry, version in pairs)

    def hold(self, holder: object) -> None:
        """Keep the device copy for one more residency."""
        self.holders.add(holder)

    def drop(self, holder: object) -> None:
        """Let go of the device copy for one residency, and of its memory with the last, in the order of the copy stream."""
        self.holders.discard(holder)
        if not self.holders and not self.bound:
            copy, self.copy = self.copy, None
            if copy is not None:
                copy.buffer.free_slice()
