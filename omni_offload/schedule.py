"""The arithmetic of streaming: what a step takes with given residents and slots, and which blocks to keep resident.

A model's blocks run one after another, step after step. Residents are on the device; the others stream through `slots` device
buffers over one copy engine. With copies t and computations c, and streamed blocks numbered k = 0, 1, ... over all steps, a copy
starts when the engine and its slot are free, and a block runs when its copy has landed and the blocks before it are done::

    A[k] = max(A[k-1], C[k-slots]) + t[k]
    C[k] = max(C[k-1] + residents between, A[k]) + c[k]

No placement is faster than `bound`, the larger of all computation and all copies. Residents that are spread over the step reach
it; the same residents at its start leave the copy engine idle while they run (up to 1.8 times the bound).
"""

from collections.abc import Collection, Iterator, Sequence

import attrs

__all__ = ["BlockCost", "Placement", "assumed_costs", "bound", "choose_residents", "least_bytes", "spread", "step_time"]

#: Steps that are simulated before the time of one is taken, and those it is taken over: the state settles within a few.
_WARM_UP, _MEASURED = 4, 4
#: Most placements that are simulated to improve one; each takes some 10 us a block.
_TRIES = 600
#: A step this close to its bound is left as it is, and gains below this are not worth another look.
_CLOSE, _GAIN = 1.001, 1e-6


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
    """

    residents: tuple[int, ...]
    slots: int
    slot_bytes: int
    resident_bytes: int

    @property
    def device_bytes(self) -> int:
        """Device bytes of residents and slots together."""
        return self.resident_bytes + self.slots * self.slot_bytes


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
    freed = [0.0] * max(slots, 1)  # when the block that used each slot last was done, in the order of use
    landed = now = started = 0.0
    position = 0
    for step in range(_WARM_UP + _MEASURED):
        if step == _WARM_UP:
            started = now
        for index, cost in enumerate(costs):
            if index not in kept:
                landed = max(landed, freed[position]) + cost.copy
                now = max(now, landed)
            now += cost.compute
            if index not in kept:
                freed[position] = now
                position = (position + 1) % len(freed)
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


def choose_residents(
    costs: Sequence[BlockCost],
    slots: int,
    *,
    number: int | None = None,
    nbytes: int | None = None,
    leading: bool = False,
) -> Placement:
    """Choose which blocks stay on the device.

    Args:
        costs: The blocks in execution order.
        slots: Device buffers for the streamed blocks, at least 1; fewer are used where fewer blocks stream.
        number: How many blocks stay; None: as many as `nbytes` allows, none without it.
        nbytes: Most device bytes of residents and slots together; None: no limit.
        leading: Take the first blocks instead of spreading them.

    Returns:
        The placement of the least step time that was found: spread so that copies keep pace with computation (a number of
        residents: by bytes), then improved by swaps.

    Raises:
        ValueError: It does not fit; the message gives the bytes that it takes.
    """
    if number is None and nbytes is not None:
        return _fill(costs, slots, nbytes, leading=leading)
    sizes = [cost.nbytes for cost in costs]
    number = min(number or 0, len(costs))
    found = _placement(costs, range(number) if leading else spread(sizes, number), slots)
    if not leading:
        found = _improve(costs, found, slots, found.device_bytes if nbytes is None else nbytes)
    if nbytes is not None and found.device_bytes > nbytes:
        raise ValueError(f"{number} resident blocks and {found.slots} slots take {found.device_bytes} bytes, and {nbytes} are there")
    return found


def assumed_costs(sizes: Sequence[int], slots: int, *, number: int | None = None, nbytes: int | None = None) -> tuple[BlockCost, ...]:
    """Return costs to choose residents by, for blocks of which only the sizes are known: balanced for what will stream.

    Args:
        sizes: Bytes of each block, in execution order.
        slots: As for `choose_residents`.
        number: As for `choose_residents`.
        nbytes: As for `choose_residents`; too few are left for that to refuse.
    """
    costs = BlockCost.balanced(sizes, sum(sizes))
    staying = 0
    if number is not None:
        staying = sum(sizes[index] for index in spread(sizes, min(number, len(sizes))))
    elif nbytes is not None and nbytes >= least_bytes(costs, slots):
        staying = choose_residents(costs, slots, nbytes=nbytes, leading=True).resident_bytes
    return BlockCost.balanced(sizes, sum(sizes) - staying)


def least_bytes(costs: Sequence[BlockCost], slots: int) -> int:
    """Return the least device bytes (residents and slots) that the blocks can run with."""
    return min(
        (_placement(costs, _above(costs, size), slots).device_bytes for size in _slot_sizes(costs)),
        default=0,
    )


def _slot_sizes(costs: Sequence[BlockCost]) -> list[int]:
    """Return the sizes that a slot may have: a block's, or none where all stay."""
    return sorted({0, *(cost.nbytes for cost in costs)})


def _above(costs: Sequence[BlockCost], size: int) -> list[int]:
    return [index for index, cost in enumerate(costs) if cost.nbytes > size]


def _placement(costs: Sequence[BlockCost], residents: Collection[int], slots: int) -> Placement:
    kept = set(residents)
    streamed = [cost.nbytes for index, cost in enumerate(costs) if index not in kept]
    return Placement(
        residents=tuple(sorted(kept)),
        slots=min(slots, len(streamed)),
        slot_bytes=max(streamed, default=0),
        resident_bytes=sum(costs[index].nbytes for index in kept),
    )


def _fill(costs: Sequence[BlockCost], slots: int, nbytes: int, *, leading: bool) -> Placement:
    """Return the best placement within some bytes: every slot size is tried, with what is larger resident."""
    found = [_placement(costs, kept, slots) for size in _slot_sizes(costs) for kept in _filled(costs, slots, size, nbytes, leading=leading)]
    fitting = [placement for placement in found if placement.device_bytes <= nbytes]
    if not fitting:
        raise ValueError(f"the blocks take at least {least_bytes(costs, slots)} bytes, and {nbytes} are there")
    close = _CLOSE * bound(costs, range(len(costs)))
    best = min(fitting, key=lambda found: (max(step_time(costs, found.residents, found.slots), close), -found.resident_bytes))
    return best if leading else _improve(costs, best, slots, nbytes, fill=True)


def _filled(costs: Sequence[BlockCost], slots: int, size: int, nbytes: int, *, leading: bool) -> Iterator[set[int]]:
    """Yield the residents for slots of a size: what is larger, and of the others as many bytes as there is room for."""
    kept = set(_above(costs, size))
    others = [index for index in range(len(costs)) if index not in kept]
    room = nbytes - _placement(costs, kept, slots).device_bytes
    if room < 0:
        return
    flow = _flow(costs, others, room)
    held, sent, due = 0, 0.0, 0.0
    for index in others:
        cost = costs[index]
        due += flow[index]
        if held + cost.nbytes <= room and (leading or sent + cost.copy / 2 > due):
            kept.add(index)
            held += cost.nbytes
        else:
            sent += cost.copy
    yield kept
    yield _topped(costs, kept, slots, nbytes)  # what rounding left


def _flow(costs: Sequence[BlockCost], others: Sequence[int], room: int) -> dict[int, float]:
    """Return the seconds of copies that should go by each block, when as many bytes of some blocks stay as there is room for.

    What streams is shared out by computation, so that neither engine waits for the other; no block has more than its own copy, and
    what that leaves over is shared by the rest.
    """
    copies, total = sum(costs[index].copy for index in others), sum(costs[index].nbytes for index in others)
    left = copies * max(1 - room / max(total, 1), 0.0)
    pace = {index: max(costs[index].compute, 1e-12) for index in others}
    work, flow = sum(pace.values()), {}
    for index in sorted(others, key=lambda index: costs[index].copy / pace[index]):
        flow[index] = min(costs[index].copy, left * pace[index] / work)
        left -= flow[index]
        work -= pace[index]
    return flow


def _topped(costs: Sequence[BlockCost], residents: Collection[int], slots: int, nbytes: int) -> set[int]:
    """Return residents and as many more as fit, large ones first."""
    kept = set(residents)
    held = _placement(costs, kept, slots).device_bytes  # a resident more makes the slots no larger
    for index in sorted(set(range(len(costs))) - kept, key=lambda index: (-costs[index].nbytes, index)):
        if held + costs[index].nbytes <= nbytes:
            kept.add(index)
            held += costs[index].nbytes
    return kept


def _improve(costs: Sequence[BlockCost], found: Placement, slots: int, nbytes: int, *, fill: bool = False) -> Placement:
    """Swap a resident for a streamed block, nearest first, as long as that shortens the step, within some bytes.

    With `fill`, a swap may also free room for more residents.
    """
    best, seconds, tries = found, step_time(costs, found.residents, found.slots), 0
    improved = True
    while improved:
        improved = False
        for old, new in _swaps(best.residents, len(costs)):
            if tries == _TRIES or seconds <= _CLOSE * (bound(costs, range(len(costs))) if fill else bound(costs, best.residents)):
                return best
            residents = {*best.residents, new} - {old}
            swapped = _placement(costs, _topped(costs, residents, slots, nbytes) if fill else residents, slots)
            if swapped.device_bytes > max(nbytes, found.device_bytes):
                continue
            tries += 1
            took = step_time(costs, swapped.residents, swapped.slots)
            if took < seconds * (1 - _GAIN):
                best, seconds, improved = swapped, took, True
                break
    return best


def _swaps(residents: Sequence[int], blocks: int) -> list[tuple[int, int]]:
    kept = set(residents)
    pairs = [(old, new) for old in residents for new in range(blocks) if new not in kept]
    return sorted(pairs, key=lambda pair: (abs(pair[0] - pair[1]), pair))
