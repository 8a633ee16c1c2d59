"""Device buffers of fixed size that blocks take turns in."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from typing_extensions import override

from omni_offload.accelerator import Accelerator
from omni_offload.residency.device import DeviceBuffer
from omni_offload.residency.host import ByteMeter

if TYPE_CHECKING:
    from omni_offload.residency.block import BlockResidency

__all__ = ["Slot", "SlotPool"]


class Slot(DeviceBuffer):
    """One device buffer that a block's weights lie in until another block's do; its memory stays when it is given back.

    Attributes:
        tenant: The block whose weights lie in it, or are on their way.
    """

    def __init__(self, accelerator: Accelerator, nbytes: int, meter: ByteMeter) -> None:
        self.tenant: BlockResidency | None = None
        super().__init__(accelerator, nbytes, meter)

    @override
    def give_back(self, taker: object) -> None:
        self._takers.discard(taker)


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
