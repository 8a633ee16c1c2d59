"""Device buffers of fixed size that blocks take turns in."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch
from typing_extensions import override

from omni_offload.accelerator import Accelerator
from omni_offload.residency.device import DeviceBuffer
from omni_offload.residency.host import ByteMeter
from omni_offload.residency.tensors import view_of

if TYPE_CHECKING:
    from omni_offload.residency.block import BlockResidency

__all__ = ["Layout", "Slot", "SlotPool"]


_LAYOUTS: "weakref.WeakValueDictionary[object, Layout]" = weakref.WeakValueDictionary()


class Layout:
    """How the tensors of a block lie in a slot. Blocks of one kind have one layout, and so share the views of each slot."""

    def __init__(self, offsets: tuple[int, ...], runs: tuple[tuple[int, int], ...]) -> None:
        self.offsets = offsets
        self.runs = runs

    @classmethod
    def of(cls, places: Iterable[tuple[int, torch.Tensor]], runs: Iterable[tuple[int, int]]) -> "Layout":
        """Return the one layout of its kind.

        Args:
            places: Offset (bytes) and like of each tensor.
            runs: Offset and size of what is copied in one go.
        """
        places, runs = tuple(places), tuple(runs)
        kind = tuple((at, t.dtype, t.shape, t.stride(), t.is_inference(), t.is_conj(), t.is_neg()) for at, t in places)
        return _LAYOUTS.setdefault((kind, runs), cls(tuple(at for at, _ in places), runs))


@attrs.frozen(eq=False)
class SlotViews:
    """What tensors of one layout are bound to in a slot, and the addresses of that."""

    tensors: tuple[torch.Tensor, ...]
    addresses: list[int]


class Slot(DeviceBuffer):
    """One device buffer that a block's weights lie in until another block's do; its memory stays when it is given back.

    Attributes:
        tenant: The block whose weights lie in it, or are on their way.
        views: Of each layout that was bound in it; made once, so that nothing is made in steady state.
    """

    passing: ClassVar[bool] = True

    def __init__(self, accelerator: Accelerator, nbytes: int, meter: ByteMeter) -> None:
        self.tenant: BlockResidency | None = None
        self.views: dict[Layout, SlotViews] = {}
        self._targets: dict[Layout, tuple[torch.Tensor, ...]] = {}
        super().__init__(accelerator, nbytes, meter)

    @override
    def take(self, taker: object, offset: int, nbytes: int) -> torch.Tensor:
        if self.raw is None:
            raise RuntimeError("the slot was freed")
        return self.raw[offset : offset + nbytes]

    @override
    def give_back(self, taker: object) -> None:
        """Nothing to do: the slot stays, and knows its tenant."""

    def targets_of(self, layout: Layout) -> tuple[torch.Tensor, ...]:
        """Return where the bytes of a layout are copied to."""
        found = self._targets.get(layout)
        if found is None:
            found = self._targets[layout] = tuple(self.take(None, at, nbytes) for at, nbytes in layout.runs)
        return found

    def views_of(self, layout: Layout, likes: Sequence[torch.Tensor]) -> SlotViews:
        """Return what tensors of a layout are bound to; made at the first binding: the copy is on its way by then."""
        found = self.views.get(layout)
        if found is None:
            raw = self.take(None, 0, self.nbytes)
            made = tuple(view_of(raw, at, like) for at, like in zip(layout.offsets, likes, strict=True))
            found = self.views[layout] = SlotViews(made, [view.data_ptr() for view in made])
        return found

    @override
    def free(self) -> None:
        super().free()
        self.views.clear()
        self._targets.clear()


class SlotPool:
    """The slots that the rings of one owner on one device take turns with: none while no ring uses them.

    Rings take slots from one another: only one is hot at a time. Whoever looks for a slot, or binds what lies in one, holds the lock.

    Attributes:
        accelerator: The device.
        lock: Held while slots change hands.
        users: The rings whose component is on the device.

    Args:
        accelerator: As the attribute.
        meter: Counts the bytes.
    """

    def __init__(self, accelerator: Accelerator, meter: ByteMeter) -> None:
        self.accelerator = accelerator
        self.lock = threading.RLock()
        self.users: set[object] = set()
        self._meter = meter
        self._slots: list[Slot] = []
        self._kept = False

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over the slots."""
        return iter(self._slots)

    def __len__(self) -> int:
        """Return how many slots there are."""
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Device bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots)

    def fits(self, count: int, nbytes: int) -> bool:
        """Whether there are so many slots of at least so many bytes."""
        return sum(slot.nbytes >= nbytes for slot in self._slots) >= count

    def nbytes_with(self, count: int, nbytes: int) -> int:
        """Device bytes of all slots once there are so many of so many bytes."""
        if self.fits(count, nbytes):
            return self.nbytes
        running = [slot.nbytes for slot in self._slots if slot.tenant is not None and slot.tenant.bound]
        return sum(running) + max(count - len(running), 0) * nbytes

    def open(self, user: object, count: int, nbytes: int) -> None:
        """Make room for a ring: so many slots of so many bytes. Where there are fewer or smaller ones, those that are idle go first.

        Raises:
            torch.OutOfMemoryError: As raised; the slots that were made are there until `close`.
        """
        with self.lock:
            self.users.add(user)
            if not self.fits(count, nbytes):
                self.trim()
                while len(self._slots) < count:
                    self._slots.append(Slot(self.accelerator, nbytes, self._meter))
            self._kept = False

    def make_extra(self, nbytes: int) -> Slot:
        """Return one slot more, beside the fixed ones, which its user frees."""
        return Slot(self.accelerator, nbytes, self._meter)

    def keep(self) -> None:
        """Keep the slots where their last user goes, for the one that is about to come: until it came, or `let_go`."""
        self._kept = bool(self._slots)

    def trim(self) -> None:
        """Free the slots in which no block runs."""
        with self.lock:
            self._free(lambda slot: slot.tenant is None or not slot.tenant.bound)

    def let_go(self) -> None:
        """Keep nothing for nobody. Idempotent."""
        with self.lock:
            self._kept = False
            if not self.users:
                self._free(lambda _: True)

    def close(self, user: object) -> None:
        """End a ring's use, whose blocks have left; with the last one's, the memory goes, in the order of the copy stream. Idempotent."""
        with self.lock:
            self.users.discard(user)
            if not self.users and not self._kept:
                self._free(lambda _: True)

    def _free(self, which: Callable[[Slot], bool]) -> None:
        for slot in [slot for slot in self._slots if which(slot)]:
            if slot.tenant is not None:
                slot.tenant.evict()
            self._slots.remove(slot)
            slot.free()
