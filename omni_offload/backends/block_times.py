"""How long the blocks of a pass compute, and how fast they are copied, by timing events on the device."""

import itertools
import statistics
from collections.abc import Collection

import attrs
import torch

from omni_offload.accelerator import Accelerator, DeviceClock

__all__ = ["BlockTimes", "TimedPass"]

#: Computations and copies that are so much longer or shorter, as parts of all, are others than before.
_STRONGLY = 0.25


@attrs.frozen
class TimedPass:
    """What one pass took on the device.

    Attributes:
        sequence: The blocks as they ran.
        compute: Seconds of each block, with what the model computes until the next is entered.
        seconds_per_byte: Of copies to the device: the median of all.
    """

    sequence: tuple[int, ...]
    compute: dict[int, float]
    seconds_per_byte: float

    def differs(self, other: "TimedPass") -> bool:
        """Whether another one took so different times that other residents may be better."""
        apart = sum(abs(self.compute.get(index, 0.0) - other.compute.get(index, 0.0)) for index in {*self.compute, *other.compute})
        rates = sorted((self.seconds_per_byte, other.seconds_per_byte))
        return apart > _STRONGLY * sum(other.compute.values()) or rates[0] < (1 - _STRONGLY) * rates[1]


class BlockTimes:
    """Notes the moments of a pass. The host does not block before its end.

    The device's stream is a row of marks: from each on it computes a block, or (None) waits for a copy or does what is no block's.

    Args:
        accelerator: The device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._clock = DeviceClock(accelerator)
        self._marks: list[tuple[torch.Event | float, int | None]] = []
        self._copies: list[tuple[int, torch.Event | float, torch.Event | float]] = []

    @property
    def possible(self) -> bool:
        """Whether the device times events."""
        return self._clock.problem is None

    def begin(self) -> None:
        """Start a pass; copies that were queued for it already count."""
        self._marks.clear()

    def mark(self, block: int | None) -> None:
        """Note that the current stream computes a block from here on; None: that it waits."""
        self._marks.append((self._clock.at(self._accelerator.current_stream()), block))

    def end(self) -> None:
        """End the pass; the host waits until the device has done it."""
        self.mark(None)
        last, _ = self._marks[-1]
        if isinstance(last, torch.Event) and not last.query():
            self._accelerator.block_on(last)

    def copy_begins(self) -> torch.Event | float:
        """Return the moment at which a copy starts that is queued next."""
        return self._clock.at(self._accelerator.copy_stream)

    def copy_ends(self, began: torch.Event | float, nbytes: int) -> None:
        """Note the copy that was queued since a moment."""
        self._copies.append((nbytes, began, self._clock.at(self._accelerator.copy_stream)))

    def read(self, blocks: Collection[int]) -> TimedPass | None:
        """Return what the pass took, and forget it; None where not all of some blocks ran, or the device has not done it all yet."""
        marks, copies = [*self._marks], [*self._copies]
        self._marks.clear()
        self._copies.clear()
        compute: dict[int, float] = {}
        for (first, block), (last, _) in itertools.pairwise(marks):
            if block is not None:
                seconds = self._clock.between(first, last)
                if seconds is None:
                    return None
                compute[block] = compute.get(block, 0.0) + seconds
        rates = [seconds / nbytes for nbytes, *moments in copies if (seconds := self._clock.between(*moments)) is not None]
        if not rates or not compute.keys() >= {*blocks}:
            return None
        sequence = tuple(block for _, block in marks if block is not None)
        return TimedPass(sequence, compute, statistics.median(rates))
