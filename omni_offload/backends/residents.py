"""Which blocks of a component stay on the device: by their sizes at first, then by what a pass took that was timed."""

from collections import Counter
from collections.abc import Collection, Sequence

import attrs

from omni_offload.backends.block_times import TimedPass
from omni_offload.schedule import BlockCost, Placement, assumed_costs, better_residents, bound, choose_residents, least_bytes, step_time

__all__ = ["ResidentChoice"]

#: Other residents are worth it that shorten a step by this part, and whose copies are made good within so many steps.
_WORTH, _REPAID = 0.01, 30
#: So many steps, where nothing is on the device yet.
_FREE = 1_000_000


class ResidentChoice:
    """Chooses the residents of one component.

    Attributes:
        timed: What a pass took by which they were chosen; None: the blocks' times were assumed, from their sizes.

    Args:
        slots: Device buffers for the blocks that stream.
        overlaps: Whether copies leave the host free; where they do not, all that counts is how much is copied.
    """

    def __init__(self, slots: int, *, overlaps: bool) -> None:
        self._slots = slots
        self._overlaps = overlaps
        self.timed: TimedPass | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        """The blocks as they run; empty where that is not known yet."""
        return () if self.timed is None else self.timed.sequence

    def learn(self, timed: TimedPass) -> bool:
        """Take in what a pass took; returns whether that is much different from what the residents were chosen by."""
        if self.timed is not None and not timed.differs(self.timed):
            return False
        self.timed = timed
        return True

    def choose(self, sizes: Sequence[int], *, number: int | None, nbytes: int | None, leading: bool, beside: int = 0) -> frozenset[int]:
        """Return the residents.

        Args:
            sizes: Device bytes of each block, in declared order.
            number: How many; None: as many as `nbytes` allows, none without it.
            nbytes: Most device bytes of residents and slots together; None: no limit.
            leading: Take the first blocks.
            beside: Bytes that the slots take at the least, as others need them.

        Raises:
            ValueError: So many do not fit.
        """
        order, costs = self._costs(sizes, number=number, nbytes=nbytes, beside=beside)
        if nbytes is not None and number is None and nbytes < least_bytes(costs, self._slots, beside=beside):
            return frozenset()  # what does not fit is said where all budgets are checked
        limit = None if number == 0 else nbytes
        found = choose_residents(costs, self._slots, number=number, nbytes=limit, leading=leading, beside=beside)
        return frozenset(order[place] for place in found.residents)

    def choose_better(  # noqa: PLR0913  (each bounds the choice)
        self, sizes: Sequence[int], residents: Collection[int], *, number: int | None, nbytes: int | None, held: bool, beside: int = 0
    ) -> frozenset[int] | None:
        """Return other residents that are worth their copies; None: there are none.

        Args:
            sizes: As for `choose`.
            residents: Those that stay now.
            number: As for `choose`.
            nbytes: As for `choose`.
            held: Whether these are on the device; else nothing is lost by others.
            beside: As for `choose`.
        """
        order, costs = self._costs(sizes, number=number, nbytes=nbytes, beside=beside)
        present = Placement.of(costs, [place for place, index in enumerate(order) if index in residents], self._slots, beside=beside)
        before = step_time(costs, present.residents, self._slots)
        if before <= (1 + _WORTH) * bound(costs, range(len(costs))) or (nbytes is not None and present.device_bytes > nbytes):
            return None  # what does not fit any more is said where room is made
        found = better_residents(costs, self._slots, present, nbytes=nbytes, fill=number is None, steps=_REPAID if held else _FREE)
        if before - step_time(costs, found.residents, self._slots) < _WORTH * before:
            return None
        return frozenset(order[place] for place in found.residents)

    def _costs(
        self, sizes: Sequence[int], *, number: int | None, nbytes: int | None, beside: int = 0
    ) -> tuple[Sequence[int], Sequence[BlockCost]]:
        """Return the blocks in the order in which they run, as far as it is known, and what each costs."""
        timed = self.timed
        if timed is None:
            costs = assumed_costs(sizes, self._slots, number=number, nbytes=nbytes, beside=beside)
            return range(len(sizes)), costs if self._overlaps else [attrs.evolve(cost, compute=0.0) for cost in costs]
        uses = Counter(timed.sequence)
        copies = [timed.seconds_per_byte * size for size in sizes]
        return (*uses,), [BlockCost(timed.compute[index], copies[index] * count, sizes[index]) for index, count in uses.items()]
