"""What a step takes with given residents and slots, by the recurrence, and what it cannot take less than."""

from collections.abc import Collection, Sequence

import attrs

__all__ = ["BlockCost", "Placement", "bound", "spread", "step_time"]

#: Steps that are simulated before the time of one is taken, and those it is taken over: the state settles within a few.
_WARM_UP, _MEASURED = 4, 4


@attrs.frozen
class BlockCost:
    """What one block costs.

    Args:
        compute: Seconds that it runs.
        copy: Seconds that its copy to the device takes.
        nbytes: Device bytes, padding included.
    """

    compute: float
    copy: float
    nbytes: int

    @staticmethod
    def balanced(sizes: Sequence[int], streamed_bytes: int) -> tuple["BlockCost", ...]:
        """Return costs for blocks of which only the sizes are known.

        Copies are proportional to bytes. Blocks are taken to compute equally long: of one model they work on the same tokens, and
        more weights are mostly for other ones (a double block of FLUX has 2.4 times the bytes of a single one and the same
        arithmetic; a UNet's level with twice the channels has a quarter of the pixels). All computation is taken to be as long as
        the copies of what streams: that is where the placement matters most, and one that is good there is good elsewhere.

        Args:
            sizes: Bytes of each block, in execution order.
            streamed_bytes: Bytes of those that will stream.
        """
        compute = streamed_bytes / max(len(sizes), 1)
        return tuple(BlockCost(compute, float(size), size) for size in sizes)


@attrs.frozen
class Placement:
    """Which blocks stay on the device, and what the others need there.

    Attributes:
        residents: Indices of the resident blocks, in execution order.
        slots: Device buffers for the streamed ones; 0 where none streams.
        slot_bytes: Bytes of one slot: the largest streamed block's.
        resident_bytes: Bytes of the residents.
        beside: Bytes that the slots take at the least, as others need them.
    """

    residents: tuple[int, ...]
    slots: int
    slot_bytes: int
    resident_bytes: int
    beside: int = 0

    @classmethod
    def of(cls, costs: Sequence[BlockCost], residents: Collection[int], slots: int, *, beside: int = 0) -> "Placement":
        """Return the placement of some residents, with up to so many slots for the other blocks."""
        kept = set(residents)
        streamed = [cost.nbytes for index, cost in enumerate(costs) if index not in kept]
        return cls(
            residents=tuple(sorted(kept)),
            slots=min(slots, len(streamed)),
            slot_bytes=max(streamed, default=0),
            resident_bytes=sum(costs[index].nbytes for index in kept),
            beside=beside,
        )

    @property
    def device_bytes(self) -> int:
        """Device bytes of residents and slots together."""
        return self.resident_bytes + max(self.slots * self.slot_bytes, self.beside)


def bound(costs: Sequence[BlockCost], residents: Collection[int]) -> float:
    """Return the seconds that no schedule of these residents can go below: all computation, or all copies of a step."""
    kept = set(residents)
    copies = sum(cost.copy for index, cost in enumerate(costs) if index not in kept)
    return max(sum(cost.compute for cost in costs), copies)


def step_time(costs: Sequence[BlockCost], residents: Collection[int], slots: int) -> float:
    """Return the seconds of one step in steady state.

    Args:
        costs: The blocks in execution order; after the last comes the first of the next step.
        residents: Indices of those on the device.
        slots: Device buffers, at least 1 where a block streams.

    Raises:
        ValueError: A block streams, and there is no slot.
    """
    kept = set(residents)
    if len(kept) < len(costs) and slots < 1:
        raise ValueError(f"{len(costs) - len(kept)} blocks stream, and slots is {slots}; give at least 1")
    streamed, between = [], 0.0  # of each: what residents compute before it, its copy, its computation
    for index, cost in enumerate(costs):
        if index in kept:
            between += cost.compute
        else:
            streamed.append((between, cost.copy, cost.compute))
            between = 0.0
    freed = [0.0] * max(slots, 1)  # when the block that used each slot last was done, in the order of use
    landed = now = started = 0.0
    position, last = 0, len(freed) - 1
    for step in range(_WARM_UP + _MEASURED):
        if step == _WARM_UP:
            started = now
        for before, copy, compute in streamed:
            free = freed[position]
            landed = (landed if landed > free else free) + copy  # noqa: FURB136  (`max` takes twice as long)
            now += before
            now = (now if now > landed else landed) + compute  # noqa: FURB136  (as above)
            freed[position] = now
            position = position + 1 if position < last else 0
        now += between
    return (now - started) / _MEASURED


def spread(sizes: Sequence[int], number: int) -> tuple[int, ...]:
    """Return so many residents, at even distances by bytes along the execution order.

    Args:
        sizes: Bytes of each block, in execution order; none is empty.
        number: How many blocks, at most all.
    """
    chosen: list[int] = []
    total, passed = sum(sizes), 0
    for index, size in enumerate(sizes):
        passed += size
        due = 2 * number * passed > (2 * len(chosen) + 1) * total
        if len(chosen) < number and (due or len(sizes) - index == number - len(chosen)):
            chosen.append(index)
    return tuple(chosen)
