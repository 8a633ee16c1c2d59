"""Blocks that stream: how much of them is on the device, which of them stay there, in which order they run, what is told of them."""

from collections.abc import Callable
from typing import Any

from omni_offload.errors import OffloadConfigError
from omni_offload.plan import PlannedComponent
from omni_offload.testing.bench import Bench, NotRun, some
from omni_offload.testing.checks.numerics import least_budget
from omni_offload.testing.detours import Detours
from omni_offload.testing.observe import Target, bytes_on, watching

__all__ = ["check_block_order", "check_block_report", "check_residents", "check_slots"]

_SLACK = 8192
#: Kinds of components that there are options for.
_SELECTABLE = ("dit", "text_encoder", "vae")


def require_blocks(bench: Bench) -> None:
    """Require that blocks stream.

    Raises:
        NotRun: The mode is `module`.
    """
    if not bench.block_paths:
        raise NotRun("a rule of mode 'layer': in mode 'module' no block streams")


def check_slots(bench: Bench) -> None:
    """While a block runs, the device holds the rest of its component and the slots, and all other blocks are what they are on the host."""
    require_blocks(bench)
    resident = bench.block_uses
    pipeline = bench.fresh()
    base, stays = bench.allocated(), bench.turn(pipeline, bench.staying(pipeline))
    paths = {use.path for use in resident}
    allowed = {path: stays + bench.turn(pipeline, bench.group(pipeline, path)) + _SLACK for path in paths}
    with bench.enabled(pipeline):
        for number in (1, 2):
            seen = _looked_at(bench, pipeline)
            if [name for name, _, _ in seen] != [use.name for use in resident]:
                bench.fail(f"the blocks to run in call {number} as in a resident run", [name for name, _, _ in seen])
            for (name, others, allocated), use in zip(seen, resident, strict=True):
                if others:
                    bench.fail(f"the weights of all other blocks on the host while {name} runs", some(others), component=use.path)
                held = allocated - base - use.allocated
                if bench.simulated and held > allowed[use.path]:
                    bench.fail(f"at most {allowed[use.path]} bytes of weights on the device while {name} runs", held, component=use.path)
            bench.require_left(pipeline, base, when=f"after call {number}", times=number)


def _looked_at(bench: Bench, pipeline: Any) -> list[tuple[str, list[str], int]]:
    """Run a call; return for each use of a block its name, the other blocks' weights on the device, and the bytes allocated there."""
    blocks = bench.blocks(pipeline)
    travelling = {name for layout in bench.layouts(pipeline).values() for name in layout.travelling}
    running: list[str] = []
    seen: list[tuple[str, list[str], int]] = []

    def around(target: Target, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running.append(target.path)
        idle = (block for block in blocks if block.path not in running)
        on_device = (f"{block.path}.{name}" for block in idle for name in bytes_on(block.module, bench.device))
        seen.append((str(target), [name for name in on_device if name in travelling], bench.allocated(collect=False)))
        try:
            return method(*args, **kwargs)
        finally:
            running.pop()

    with watching(blocks, around):
        bench.require_equal(bench.call(pipeline), when="of blocks that were looked at")
    return seen


def check_residents(bench: Bench) -> None:
    """As many blocks as are asked for stay on the device while their component is used, or as a budget holds; outputs are equal."""
    require_blocks(bench)
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    blocks = {path: layout.blocks for path, layout in bench.layouts(pipeline).items()}
    streaming = [c for c in bench.plan(pipeline).components if c.path in blocks and c.kind in _SELECTABLE]
    most = {kind: min(len(blocks[c.path]) for c in streaming if c.kind == kind) for kind in {c.kind for c in streaming}}
    for part, placement in ((0.0, "spread"), (0.5, "leading"), (1.0, "spread")):
        options = {kind: {"resident_layers": max(int(part * count), 1), "resident_placement": placement} for kind, count in most.items()}
        with bench.enabled(pipeline, layer_options=options):
            seen = _looked_at(bench, pipeline)
        for component in bench.plan(pipeline, layer_options=options).components:
            if component.resident_layers is not None and component.path in blocks:
                looks = [(name.removesuffix(".forward"), others) for name, others, _ in seen if name.startswith(f"{component.path}.")]
                staying = _always_there(looks, blocks[component.path])
                _require_residents(bench, component, staying, list(blocks[component.path]), leading=placement == "leading")
        bench.require_disabled(pipeline, base, pinned, times=2)
    for kind in most:
        try:
            bench.enable(pipeline, layer_options={kind: {"resident_layers": max(map(len, blocks.values())) + 1}})
        except OffloadConfigError:
            bench.require_disabled(pipeline, base, pinned, when="after more residents than blocks were refused", times=2)
        else:
            bench.fail("OffloadConfigError for more residents than there are blocks", "no error")
    _require_budgets_kept(bench, pipeline)


def _always_there(looks: list[tuple[str, list[str]]], blocks: dict[str, int]) -> list[str] | None:
    """Return the blocks that are on the device whenever another one runs; None where too few run, or one has no weights of its own.

    Args:
        looks: For each use of a block its path, and the names of other blocks' weights on the device.
        blocks: The blocks of the component, with their bytes.
    """
    if len({path for path, _ in looks}) < 2 or not all(blocks.values()):
        return None
    there = [(path, {block for block in blocks if any(name.startswith(f"{block}.") for name in names)}) for path, names in looks]
    return [block for block in blocks if all(block in others for running, others in there if running != block)]


def _require_residents(bench: Bench, component: PlannedComponent, staying: list[str] | None, blocks: list[str], *, leading: bool) -> None:
    number = component.resident_layers or 0
    if staying is not None and len(staying) != number:
        bench.fail(f"{number} of {len(blocks)} blocks on the device whenever another one runs", staying, component=component.path)
    if leading and staying not in (None, blocks[:number]):
        bench.fail(f"the first {number} blocks to stay with placement 'leading'", staying, component=component.path)


def _require_budgets_kept(bench: Bench, pipeline: Any) -> None:
    """Require that between the least budget and one that holds everything the budgets are kept, and that the last one streams nothing."""
    least, everything = least_budget(bench, pipeline), 2 * bench.reference.weights
    parts, more = bench.sample([1, 2, 3, 5, 8], 1), max(bench.reference.weights - least, 0)  # slots may hold more than all weights
    for budget in (*(least + more * part // 10 for part in parts), everything):
        base = bench.allocated()
        bench.reset_peak()
        with bench.enabled(pipeline, device_memory=budget) as backend:
            bench.require_equal(bench.call(pipeline), when=f"with device_memory={budget}")
            report = backend.report()
            held = bench.peak() - base - bench.reference.activations
        if max(held - _SLACK, report.peak_device_bytes) > budget:
            bench.fail(f"at most device_memory={budget} bytes held", f"{held} measured, {report.peak_device_bytes} reported")
    once = sum(layout.whole for layout in bench.layouts(pipeline).values())
    streamed = sum(component.bytes_in for component in report.components if component.treatment == "stream")
    if streamed > once * max(1, *(component.loads for component in report.components)):
        bench.fail(f"no block copied twice a load with device_memory={everything}, which holds everything", f"{streamed} bytes")


def check_block_order(bench: Bench) -> None:
    """Blocks left out, repeated, reversed, run beside others or not to the end give what a resident run gives that does the same."""
    require_blocks(bench)
    resident, pipeline = bench.fresh(), bench.fresh()
    bench.to_device(resident)
    try:
        expected, beside = _with_detours(bench, resident)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise NotRun(f"without offload the pipeline does not run with its blocks in another order: {error}") from error
    base = bench.allocated()
    with bench.enabled(pipeline):
        found, found_beside = _with_detours(bench, pipeline)
        for number, (outputs, wanted) in enumerate(zip(found, expected, strict=True), 1):
            bench.require_equal(outputs, when=f"of call {number} with its blocks in another order", expected=wanted)
        if found_beside != beside:
            bench.fail("what blocks return that run out of turn to equal a resident run's", "others")
        bench.require_left(pipeline, base, when="after calls with blocks in another order", times=2)
        bench.require_equal(bench.call(pipeline), when="after calls with blocks in another order")


def _with_detours(bench: Bench, pipeline: Any) -> tuple[list[list[Any]], list[float]]:
    detours, outputs = Detours(bench, pipeline), []
    for _ in range(2):
        with detours.taking():
            outputs.append(bench.call(pipeline))
    if not detours.taken:
        raise NotRun("a call runs too few blocks to leave any out")
    return outputs, detours.beside


def check_block_report(bench: Bench) -> None:
    """Hits, misses and wasted copies in the report add up to the blocks that were copied; an order that repeats is learned."""
    require_blocks(bench)
    uses = bench.block_uses
    pipeline = bench.fresh()
    layouts = bench.layouts(pipeline)
    with bench.enabled(pipeline) as backend:
        bench.call(pipeline, keep=False)
        before = {component.name: component for component in backend.report().components}
        bench.call(pipeline, keep=False)
        after = {component.name: component for component in backend.report().components}
    for path, layout in layouts.items():
        told = {name: getattr(after[path], name) - getattr(before[path], name) for name in _COUNTED}
        names = [use.name for use in uses if use.path == path]
        shared = len(bench.group(pipeline, path) & layouts.keys()) > 1  # others take its slots, between and before its uses
        least = max(told["misses"] - told["loads"], 0)  # of blocks, when they were entered
        most = told["misses"] if len(bench.group(pipeline, path)) > 1 else least  # what moves along with another has no miss of its own
        blocks = [nbytes for nbytes in layout.blocks.values() if nbytes]
        copied = told["bytes_in"] - told["loads"] * layout.rest
        copies = told["prefetch_hits"] + told["wasted_copies"]
        if not (copies + least) * min(blocks) - _SLACK <= copied <= (copies + most) * max(blocks) + _SLACK:
            bench.fail(f"hits, misses and wasted copies of blocks that add up to {copied} bytes copied", told, component=path)
        if told["prefetch_hits"] + least > len(names):
            bench.fail(f"no more hits and misses than the {len(names)} uses of blocks", told, component=path)
        missing = layout.slots * sum(use.path == path for use in bench.reference.uses) if shared else 0
        wasted = layout.slots * told["loads"] + missing
        if _repeats(names) and (least > missing or told["wasted_copies"] > wasted):
            bench.fail(f"{missing} misses and {wasted} wasted copies at most in a second call of the same order", told, component=path)


_COUNTED = ("loads", "prefetch_hits", "misses", "wasted_copies", "bytes_in")


def _repeats(names: list[str]) -> bool:
    """Whether a sequence is its beginning, up to where it begins again, over and over."""
    if not names:
        return False
    period = names.index(names[0], 1) if names.count(names[0]) > 1 else len(names)
    return all(name == names[index % period] for index, name in enumerate(names))
