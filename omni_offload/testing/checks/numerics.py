"""The outputs are those of a resident run, and nothing depends on luck."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from omni_offload.errors import OffloadConfigError
from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.observe import device_size

__all__ = ["check_numerics", "check_numerics_on_least_budget", "check_numerics_unpinned", "check_races", "check_streams"]


def check_numerics(bench: Bench) -> None:
    """With pinned masters two calls in a row equal the resident run bit for bit."""
    _call_twice(bench, pin_memory=True)


def check_numerics_unpinned(bench: Bench) -> None:
    """With unpinned masters two calls in a row equal the resident run bit for bit."""
    _call_twice(bench, pin_memory=False)


def _call_twice(bench: Bench, **keys: object) -> None:
    pipeline = bench.fresh()
    with bench.enabled(pipeline, **keys):
        for number in (1, 2):
            bench.require_equal(bench.call(pipeline), when=f"of call {number} with {keys}")


def check_numerics_on_least_budget(bench: Bench) -> None:
    """On the least device_memory two calls equal the resident run; a byte less than is accepted is refused, with nothing touched."""
    pipeline = bench.fresh()
    least = _accepted_budget(bench, pipeline)
    base, pinned = bench.allocated(), bench.pinned()
    try:
        bench.enable(pipeline, device_memory=least - 1)
    except OffloadConfigError:
        bench.require_disabled(pipeline, base, pinned, when="after a refused budget")
    components, staying = bench.components(pipeline), bench.staying(pipeline)
    bound = device_size([components[path] for path in staying]) + bench.largest_group(pipeline, staying, alone=True) + 512 * len(components)
    if least > bound:
        bench.fail(
            f"a budget for what stays and the largest group of components ({bound} bytes) to be accepted", f"the least is {least} bytes"
        )
    _call_twice(bench, device_memory=least_budget(bench, pipeline))


def least_budget(bench: Bench, pipeline: Any) -> int:
    """Return the least `device_memory` in bytes that a call runs with: what enabling accepts, or more where the call casts a component.

    Raises:
        NotRun: The pipeline owns its offload by hand and takes no budget.
    """
    return max(_accepted_budget(bench, pipeline), *_cast_sizes(bench, pipeline), 0)


def _cast_sizes(bench: Bench, pipeline: Any) -> Iterator[int]:
    """Yield, for every component that a call casts, the device bytes of it, of those that move with it, and of what stays."""
    staying, components = bench.staying(pipeline), bench.components(pipeline)
    stays = device_size([components[path] for path in staying])
    for path in bench.reference.recast.keys() - staying:
        others = bench.group(pipeline, path) - staying - {path}
        yield bench.reference.recast[path] + stays + bench.turn(pipeline, others)


def _accepted_budget(bench: Bench, pipeline: Any) -> int:
    """Return the least that enabling accepts, found once a bench: the refusal names it, else by halving.

    Raises:
        NotRun: As `least_budget`.
    """
    if bench.by_hand(pipeline):
        raise NotRun("the pipeline owns its model-level offload by hand, and takes no byte budget")
    if bench.least_budget is None:
        bench.least_budget = _told_budget(bench, pipeline)
    if bench.least_budget is None:
        components, staying = bench.components(pipeline), bench.staying(pipeline)
        tight = [device_size([components[path]], alignment=1) - 512 for path in components]
        low = max(size for size in (1, *tight)) - 1
        high = device_size(components.values()) + 512 * len(components) if staying else bench.largest_group(pipeline, staying) + 512
        bench.least_budget = _halve(bench, pipeline, low, high)
    return bench.least_budget


def _told_budget(bench: Bench, pipeline: Any) -> int | None:
    """Return the number of bytes that a refusal names, where that is accepted and a byte less is not."""
    try:
        with bench.enabled(pipeline, device_memory=1):
            return None
    except OffloadConfigError as error:
        told = max(map(int, re.findall(r"\d+", str(error))), default=0)
    right = told > 1 and _accepts(bench, pipeline, told) and not _accepts(bench, pipeline, told - 1)
    return told if right else None


def _halve(bench: Bench, pipeline: Any, low: int, high: int) -> int:
    """Return the least accepted budget; `low` and `high` are guesses of one that is refused and one that is accepted."""
    while low > 0 and _accepts(bench, pipeline, low):
        low //= 2
    while not _accepts(bench, pipeline, high):
        low, high = high, 2 * high
        if high > 4 * bench.reference.weights + (1 << 20):
            bench.fail("a device_memory of four times the weights to be accepted", "OffloadConfigError")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _accepts(bench, pipeline, middle) else (middle, high)
    return high


def _accepts(bench: Bench, pipeline: Any, budget: int) -> bool:
    try:
        with bench.enabled(pipeline, device_memory=budget):
            return True
    except OffloadConfigError:
        return False


def check_streams(bench: Bench) -> None:
    """Calls and uses from any stream, also from another one than the last, are right and wait for what they need."""
    pipeline = bench.fresh()
    side = torch.Stream(bench.device)
    home = torch.accelerator.current_stream(bench.device)
    known = bench.race_count()
    with bench.enabled(pipeline):
        for stream in (side, home, side):
            torch.accelerator.set_stream(stream)
            try:
                bench.require_equal(bench.call(pipeline), when=f"of a call on stream {stream.stream_id}")
            finally:
                torch.accelerator.set_stream(home)
                torch.accelerator.synchronize(bench.device)
    if bench.race_count() > known:
        bench.fail("no race between streams", f"{bench.race_count() - known}")


def check_races(bench: Bench) -> None:
    """No operation lacks a wait: asynchronous and virtual copies, fresh memory that is poison, and in all checks before."""
    sim = bench.need_simulation("finds races")
    pipeline = bench.fresh()
    for mode, pin in (("threads", True), ("threads", False), ("virtual", True)):  # all other checks: virtual, without latency
        known = len(sim.races())
        with sim.settings(mode=mode, copy_latency=1e-3), bench.enabled(pipeline, pin_memory=pin):
            for _ in range(2):
                bench.require_equal(bench.call(pipeline), when=f"in mode {mode} with pin_memory={pin}")
        found = sim.races()[known:]
        if found:
            bench.fail(f"no race in mode {mode} with pin_memory={pin}", f"{len(found)}, the first: {found[0].message}")
    if bench.races:
        bench.fail("no race in any check before", f"{len(bench.races)}, the first: {bench.races[0]}")
