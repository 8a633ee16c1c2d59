"""Device buffers of fixed size that blocks take turns in."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

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
    """The slots of one ring: none while it is closed.

    Args:
        accelerator: The device.
        meter: Counts the bytes.
    """

    def __init__(self, accelerator: Accelerator, meter: ByteMeter) -> None:
        self.accelerator = accelerator
        self._meter = meter
        self._slots: list[Slot] = []

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
        """Whether the slots are so many, of at least so many bytes."""
        return len(self._slots) == count and all(slot.nbytes >= nbytes for slot in self._slots)

    def open(self, count: int, nbytes: int) -> None:
        """Take the memory of so many slots of so many bytes; there must be none.

        Raises:
            torch.OutOfMemoryError: As raised; the slots that were made are there until `close`.
        """
        while len(self._slots) < count:
            self._slots.append(Slot(self.accelerator, nbytes, self._meter))

    def make_extra(self, nbytes: int) -> Slot:
        """Return one slot more, beside the fixed ones, which its user frees."""
        return Slot(self.accelerator, nbytes, self._meter)

    def close(self) -> None:
        """Give the memory back, in the order of the copy stream; the tenants have left. Idempotent."""
        while self._slots:
            self._slots[-1].free()
            self._slots.pop()
