"""How long the blocks of a pass compute, and how fast they are copied, by timing events on the device."""

import itertools
import statistics
from collections.abc import Collection
from typing import cast

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
        self._marks: list[tuple[torch.Event, int | None]] = []
        self._copies: list[tuple[int, torch.Event, torch.Event]] = []
        self._streams: set[int] = set()

    @property
    def possible(self) -> bool:
        """Whether the device times events."""
        return self._clock.problem is None

    def begin(self) -> None:
        """Start a pass; copies that were queued for it already count."""
        self._marks.clear()
        self._streams.clear()

    def mark(self, block: int | None) -> None:
        """Note that the current stream computes a block from here on; None: that it waits."""
        stream = self._accelerator.current_stream()
        self._streams.add(stream.stream_id)
        self._marks.append((self._at(stream), block))

    def forget(self) -> None:
        """Drop what was noted of a pass that is not read."""
        self._marks.clear()
        self._copies.clear()

    def end(self) -> None:
        """End the pass; the host waits until the device has done it."""
        self.mark(None)
        self._accelerator.block_on(self._marks[-1][0])

    def copy_begins(self) -> torch.Event:
        """Return the moment at which a copy starts that is queued next."""
        return self._at(self._accelerator.copy_stream)

    def copy_ends(self, began: torch.Event, nbytes: int) -> None:
        """Note the copy that was queued since a moment."""
        self._copies.append((nbytes, began, self._at(self._accelerator.copy_stream)))

    def read(self, blocks: Collection[int]) -> TimedPass | None:
        """Return what the pass took, and forget it; None where not all of some blocks ran, or they ran on several streams."""
        marks, copies = [*self._marks], [*self._copies]
        self.forget()
        while copies and not copies[-1][-1].query():
            copies.pop()  # it is on its way for the next pass; those before it have landed
        sequence = tuple(block for _, block in marks if block is not None)
        if not copies or len(self._streams) > 1 or not {*sequence} >= {*blocks}:
            return None
        compute = dict.fromkeys(sequence, 0.0)
        for (first, block), (last, _) in itertools.pairwise(marks):
            if block is not None:
                compute[block] += self._clock.between(first, last)
        rates = (self._clock.between(first, last) / nbytes for nbytes, first, last in copies)
        return TimedPass(sequence, compute, statistics.median(rates))

    def _at(self, stream: torch.Stream) -> torch.Event:
        return cast("torch.Event", self._clock.at(stream))  # it is one where the device times events
