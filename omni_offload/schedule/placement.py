"""Which blocks to keep resident, within a number or some bytes."""

import functools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from omni_offload.schedule.recurrence import BlockCost, Placement, bound, spread, step_time

__all__ = ["assumed_costs", "better_residents", "choose_residents", "least_bytes"]

#: So many placements in a row that are no better end the search; each takes about 1 us a block.
_TRIES = 300
#: Most residents that leave at once, and how often those come first that cost least.
_LEAVING, _FREE_FIRST = 2, 0.5
#: A step this close to its bound is left as it is, and gains below this are not worth another look.
_CLOSE, _GAIN = 1.001, 1e-6

#: Makes the placement of some residents.
_Place = Callable[[Collection[int]], Placement]


def choose_residents(  # noqa: PLR0913  (each bounds the choice)
    costs: Sequence[BlockCost],
    slots: int,
    *,
    number: int | None = None,
    nbytes: int | None = None,
    leading: bool = False,
    beside: int = 0,
) -> Placement:
    """Choose which blocks stay on the device.

    Args:
        costs: The blocks in execution order.
        slots: Device buffers for the streamed blocks, at least 1; fewer are used where fewer blocks stream.
        number: How many blocks stay; None: as many as `nbytes` allows, none without it.
        nbytes: Most device bytes of residents and slots together; None: no limit.
        leading: Take the first blocks instead of spreading them.
        beside: Bytes that the slots take at the least: models that move together have theirs in common.

    Returns:
        The placement of the least step time that was found: spread so that copies keep pace with computation (a number of
        residents: by bytes), then improved by swaps.

    Raises:
        ValueError: It does not fit; the message gives the bytes that it takes.
    """
    place = functools.partial(Placement.of, costs, slots=slots, beside=beside)
    if number is None and nbytes is not None:
        return _fill(costs, place, nbytes, leading=leading)
    sizes = [cost.nbytes for cost in costs]
    number = min(number or 0, len(costs))
    found = place(range(number) if leading else spread(sizes, number))
    if not leading:
        if nbytes is not None and found.device_bytes > nbytes:
            found = _smallest(costs, place, number)
        found = _improve(costs, place, found, found.device_bytes if nbytes is None else nbytes)
    if nbytes is not None and found.device_bytes > nbytes:
        raise ValueError(f"{number} resident blocks and {found.slots} slots take {found.device_bytes} bytes, and {nbytes} are there")
    return found


def better_residents(  # noqa: PLR0913  (as above)
    costs: Sequence[BlockCost], slots: int, present: Placement, *, nbytes: int | None, fill: bool, steps: int
) -> Placement:
    """Choose residents in the place of others. What is copied for those that come has to be made good within some steps.

    Args:
        costs: The blocks in execution order.
        slots: As for `choose_residents`.
        present: Those that stay now; others stream.
        nbytes: Most device bytes of residents and slots together; None: as many as now.
        fill: Keep as many as there is room for; else as many as now.
        steps: As said.

    Returns:
        The best placement that was found, in step time and these copies' share: the present one, or one that is better.
    """
    room = present.device_bytes if nbytes is None else nbytes
    prices = [0.0 if index in present.residents else cost.copy / steps for index, cost in enumerate(costs)]
    anew = choose_residents(costs, slots, number=None if fill else len(present.residents), nbytes=room, beside=present.beside)
    place = functools.partial(Placement.of, costs, slots=slots, beside=present.beside)
    found = _improve(costs, place, anew, room, fill=fill, prices=prices)
    return min((present, found), key=lambda placement: _seconds(costs, placement, prices))


def assumed_costs(
    sizes: Sequence[int], slots: int, *, number: int | None = None, nbytes: int | None = None, beside: int = 0
) -> tuple[BlockCost, ...]:
    """Return costs to choose residents by, for blocks of which only the sizes are known: balanced for what will stream.

    Args:
        sizes: Bytes of each block, in execution order.
        slots: As for `choose_residents`.
        number: As for `choose_residents`.
        nbytes: As for `choose_residents`; too few are left for that to refuse.
        beside: As for `choose_residents`.
    """
    costs = BlockCost.balanced(sizes, sum(sizes))
    staying = 0
    if number is not None:
        staying = sum(sizes[index] for index in spread(sizes, min(number, len(sizes))))
    elif nbytes is not None and nbytes >= least_bytes(costs, slots, beside=beside):
        staying = choose_residents(costs, slots, nbytes=nbytes, leading=True, beside=beside).resident_bytes
    return BlockCost.balanced(sizes, sum(sizes) - staying)


def least_bytes(costs: Sequence[BlockCost], slots: int, *, beside: int = 0) -> int:
    """Return the least device bytes (residents and slots) that the blocks can run with; the slots take so many at the least."""
    return _least(costs, functools.partial(Placement.of, costs, slots=slots, beside=beside))


def _least(costs: Sequence[BlockCost], place: _Place) -> int:
    return min(place(_above(costs, size)).device_bytes for size in _slot_sizes(costs))


def _smallest(costs: Sequence[BlockCost], place: _Place, number: int) -> Placement:
    """Return the placement of so many residents that takes the least device bytes."""
    small_first = sorted(range(len(costs)), key=lambda index: costs[index].nbytes)
    larger = (_above(costs, size) for size in _slot_sizes(costs))
    found = ({*kept, *small_first[: number - len(kept)]} for kept in larger if len(kept) <= number)
    return min(map(place, found), key=lambda placement: placement.device_bytes)


def _slot_sizes(costs: Sequence[BlockCost]) -> list[int]:
    """Return the sizes that a slot may have: a block's, or none where all stay."""
    return sorted({0, *(cost.nbytes for cost in costs)})


def _above(costs: Sequence[BlockCost], size: int) -> list[int]:
    return [index for index, cost in enumerate(costs) if cost.nbytes > size]


def _fill(costs: Sequence[BlockCost], place: _Place, nbytes: int, *, leading: bool) -> Placement:
    """Return the best placement within some bytes: every slot size is tried, with what is larger resident."""
    found = [place(kept) for size in _slot_sizes(costs) for kept in _filled(costs, place, size, nbytes, leading=leading)]
    fitting = [placement for placement in found if placement.device_bytes <= nbytes]
    if not fitting:
        raise ValueError(f"the blocks take at least {_least(costs, place)} bytes, and {nbytes} are there")
    close = _CLOSE * bound(costs, range(len(costs)))
    best = min(fitting, key=lambda found: (max(step_time(costs, found.residents, found.slots), close), -found.resident_bytes))
    return best if leading else _improve(costs, place, best, nbytes, fill=True)


def _filled(costs: Sequence[BlockCost], place: _Place, size: int, nbytes: int, *, leading: bool) -> Iterator[set[int]]:
    """Yield the residents for slots of a size: what is larger, and of the others as many bytes as there is room for."""
    kept = set(_above(costs, size))
    others = [index for index in range(len(costs)) if index not in kept]
    room = nbytes - place(kept).device_bytes
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
    large_first = sorted(set(others) - kept, key=lambda index: (-costs[index].nbytes, index))
    yield _topped(costs, kept, room - held, large_first)  # what rounding left


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


def _topped(
    costs: Sequence[BlockCost], residents: Collection[int], room: int, order: Iterable[int], *, most: int | None = None
) -> set[int]:
    """Return residents and as many others as there is room for, up to a number, in a given order."""
    kept = set(residents)
    for index in order:
        if costs[index].nbytes <= room and len(kept) != most:
            kept.add(index)
            room -= costs[index].nbytes
    return kept


def _improve(  # noqa: PLR0913  (as above)
    costs: Sequence[BlockCost], place: _Place, found: Placement, nbytes: int, *, fill: bool = False, prices: Sequence[float] = ()
) -> Placement:
    """Let a few residents leave for other blocks, all drawn at random, as long as that shortens the step, within some bytes.

    Args:
        costs: As for `choose_residents`.
        place: Makes the placement of some residents.
        found: What is improved.
        nbytes: Device bytes of residents and slots.
        fill: Take as many others as there is room for; else as many as leave.
        prices: Seconds of a step that each block costs as a resident; none: nothing.
    """
    draw = random.Random(0)  # noqa: S311  (the same blocks give the same placement)
    best, seconds, since = found, _seconds(costs, found, prices), 0
    while best.residents and since < _TRIES:
        if seconds <= _CLOSE * bound(costs, range(len(costs)) if fill else best.residents):
            return best
        since += 1
        kept = {*best.residents}.difference(draw.sample(best.residents, min(draw.randint(1, _LEAVING), len(best.residents))))
        others = [index for index in range(len(costs)) if index not in best.residents]
        room = nbytes - place(kept).device_bytes  # a resident more makes the slots no larger
        most = len(costs) if fill else len(best.residents)
        coming = draw.sample(others, len(others))
        if prices and draw.random() < _FREE_FIRST:
            coming.sort(key=lambda index: prices[index])
        tried = place(_topped(costs, kept, room, coming, most=most))
        if tried.device_bytes > nbytes or (len(tried.residents) < most and not fill):
            continue
        took = _seconds(costs, tried, prices)
        if took < seconds * (1 - _GAIN):
            best, seconds, since = tried, took, 0
    return best


def _seconds(costs: Sequence[BlockCost], placement: Placement, prices: Sequence[float]) -> float:
    return step_time(costs, placement.residents, placement.slots) + sum(prices[index] for index in placement.residents if prices)
