"""The best model-level schedule there is, by exhaustive search: an independent model that knows nothing of the framework.

A generation is a sequence of uses. Each use needs its component, whole, on the device until it ends; one use runs at a time, and
one copy engine loads one component at a time. Weights are only read, so that letting go of a component costs nothing and frees
its memory when its last use before that has ended. Memory is taken from the start of a load.

Free to choose are, for each component that is used again later, whether it stays or is loaded again, and in which order loads
are issued; each then starts as early as the engine and the memory allow. All choices are tried.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs

__all__ = ["Schedule", "Use", "best_schedule"]


@attrs.frozen
class Use:
    """One use of a component: its name, and how long it computes (seconds)."""

    component: str
    seconds: float


@attrs.frozen
class Residency:
    """One stay of a component on the device, for the uses with these indices."""

    component: str
    uses: tuple[int, ...]


@attrs.frozen
class Schedule:
    """The best schedule found: its makespan (seconds), the loads in order, and how many schedules were tried."""

    seconds: float
    loads: tuple[Residency, ...]
    tried: int


def best_schedule(
    uses: Sequence[Use],
    sizes: Mapping[str, int],
    load_seconds: Mapping[str, float],
    *,
    budget: int | None = None,
    together: Sequence[Collection[str]] = (),
) -> Schedule:
    """Return the schedule of least makespan.

    Args:
        uses: The generation's uses, in order.
        sizes: Bytes of each component.
        load_seconds: What each component's copy takes.
        budget: Device bytes; None: one component at a time, whatever its size, or components that may be there together.
        together: Groups of components that may.

    Raises:
        ValueError: The budget does not hold the largest component.
    """
    fits = functools.partial(_fits, sizes=sizes, budget=budget, together=together)
    best: Schedule | None = None
    tried = 0
    for residencies in _stays(uses):
        for order in _orders(residencies):
            tried += 1
            bound = best.seconds if best else float("inf")
            seconds = _makespan(uses, order, load_seconds, fits, bound)
            if seconds is not None and seconds < bound:
                best = Schedule(seconds, order, 0)
    if best is None:
        raise ValueError(f"no schedule fits into {budget} bytes")
    return attrs.evolve(best, tried=tried)


def _stays(uses: Sequence[Use]) -> Iterator[list[Residency]]:
    """Yield every way to split each component's uses into stays."""
    names = list(dict.fromkeys(use.component for use in uses))
    ways = []
    for name in names:
        indices = [i for i, use in enumerate(uses) if use.component == name]
        splits = itertools.product((False, True), repeat=len(indices) - 1)
        ways.append([_split(name, indices, split) for split in splits])
    for choice in itertools.product(*ways):
        yield [stay for stays in choice for stay in stays]


def _split(name: str, indices: Sequence[int], split: Sequence[bool]) -> list[Residency]:
    stays: list[list[int]] = [[indices[0]]]
    for index, again in zip(indices[1:], split, strict=True):
        if again:
            stays.append([])
        stays[-1].append(index)
    return [Residency(name, tuple(stay)) for stay in stays]


def _orders(residencies: Sequence[Residency]) -> Iterator[tuple[Residency, ...]]:
    """Yield every order of the loads in which a component's stays follow one another."""
    for order in itertools.permutations(residencies):
        last: dict[str, int] = {}
        for stay in order:
            if last.get(stay.component, -1) > stay.uses[0]:
                break
            last[stay.component] = stay.uses[0]
        else:
            yield order


def _makespan(
    uses: Sequence[Use],
    order: Sequence[Residency],
    load_seconds: Mapping[str, float],
    fits: Callable[[Sequence[Residency]], bool],
    bound: float,
) -> float | None:
    """Return when the last use ends; None where the loads wait for one another, or not before the bound."""
    needed = {index: stay for stay in order for index in stay.uses}
    landed: dict[Residency, float] = {}
    ends: list[float] = []
    held: list[Residency] = []
    engine = 0.0

    def run_on() -> None:
        while len(ends) < len(uses) and needed[len(ends)] in landed:
            start = max(ends[-1] if ends else 0.0, landed[needed[len(ends)]])
            ends.append(start + uses[len(ends)].seconds)

    for stay in order:
        start = engine
        # What has to go: a stay's memory is free once its last use has ended, if that use can run at all by now.
        held.sort(key=lambda other: other.uses[-1])
        while held and not fits([*held, stay]):
            gone = held.pop(0)
            if gone.uses[-1] >= len(ends):
                return None
            start = max(start, ends[gone.uses[-1]])
        if not fits([*held, stay]):
            return None
        # A component's next stay begins only after the one before it has ended.
        for other in [other for other in held if other.component == stay.component]:
            if other.uses[-1] >= len(ends):
                return None
            start = max(start, ends[other.uses[-1]])
            held.remove(other)
        engine = landed[stay] = start + load_seconds[stay.component]
        if engine >= bound:
            return None
        held.append(stay)
        run_on()
    return ends[-1] if len(ends) == len(uses) else None


def _fits(held: Sequence[Residency], sizes: Mapping[str, int], budget: int | None, together: Sequence[Collection[str]]) -> bool:
    if budget is None:
        names = {stay.component for stay in held}
        return len(held) == 1 or any(names <= set(group) for group in together)
    return sum(sizes[stay.component] for stay in held) <= budget
