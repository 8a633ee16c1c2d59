"""How many bytes the device holds, and how many are copied."""

from typing import Any

from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.checks.numerics import least_budget
from omni_offload.testing.observe import copied_back, device_size

__all__ = ["check_budget", "check_host_budget", "check_peak", "check_report", "check_traffic"]

_SLACK = 8192
#: Bytes that the smallest ring for pageable weights needs, and a page beside it.
_LEAST_HOST_BUDGET = 16384


def check_peak(bench: Bench) -> None:
    """The peak is at most what stays, the largest group of components, and the activations of a resident run."""
    pipeline = bench.fresh()
    components = bench.components(pipeline)
    kinds = {component.kind for component in bench.plan(pipeline).components}
    for keys in ({}, {"components": ["dit"]}) if "dit" in kinds and len(kinds) > 1 else ({},):
        staying = bench.staying(pipeline, **keys)
        allowed = device_size([components[path] for path in staying]) + 512 * len(components)
        allowed += bench.largest_group(pipeline, staying) + bench.reference.activations + _SLACK
        for path in staying & bench.reference.recast.keys():
            allowed += bench.reference.recast[path]  # what it was is held until its next use,
            allowed += device_size([components[path]], alignment=512) - device_size([components[path]])  # each weight alone after a cast
        base = bench.allocated()
        bench.reset_peak()
        with bench.enabled(pipeline, **keys):
            for _ in range(1 if keys else 2):
                bench.call(pipeline, keep=False)
            held = bench.peak() - base
        if held > allowed:
            bench.fail(
                f"a peak of at most {allowed} bytes with {keys or 'all components'} offloaded, {bench.reference.activations} of them "
                "activations",
                held,
            )


def check_budget(bench: Bench) -> None:
    """Under a device_memory the framework holds no more than that, on the least one, on more, and with keep_between_calls."""
    pipeline = bench.fresh()
    least = least_budget(bench, pipeline)
    every = [(budget, keep) for budget in (least, least * 3 // 2) for keep in (False, True)]
    for budget, keep in every if bench.exhaustive else every[1:3]:
        base = bench.allocated()
        bench.reset_peak()
        with bench.enabled(pipeline, device_memory=budget, keep_between_calls=keep) as backend:
            for _ in range(2):
                bench.require_equal(bench.call(pipeline), when=f"with device_memory={budget}")
            held, told = bench.peak() - base - bench.reference.activations, backend.report().peak_device_bytes
        if max(held - _SLACK, told) > budget:
            bench.fail(f"at most device_memory={budget} bytes held", f"{held} measured, {told} reported")


def check_host_budget(bench: Bench) -> None:
    """Under a host_memory the framework pins no more than that; what is left out stays pageable, and outputs stay right."""
    bench.need_simulation("counts pinned bytes")
    pipeline = bench.fresh()
    if bench.by_hand(pipeline):
        raise NotRun("the pipeline owns its model-level offload by hand, and takes no byte budget")
    pinned = bench.pinned()
    with bench.enabled(pipeline):
        whole = bench.pinned() - pinned
    budget = max(whole // 2, _LEAST_HOST_BUDGET)
    with bench.enabled(pipeline, host_memory=budget) as backend:
        for number in (1, 2):
            bench.require_equal(bench.call(pipeline), when=f"of call {number} with host_memory={budget}")
            held, told = bench.pinned() - pinned, backend.report().totals["pinned_bytes"]
            if max(held, told) > budget:
                bench.fail(f"at most host_memory={budget} bytes pinned", f"{held} measured, {told} reported, of {whole} without a limit")
    if bench.pinned() > pinned:
        bench.fail("nothing pinned after disable", f"{bench.pinned() - pinned} bytes")


def check_traffic(bench: Bench) -> None:
    """No weight that was not written is copied back; a load copies a component's bytes once, of what streams the rest.

    A block is copied once each time that it runs, and those that are fetched first once more for a pass that does not come.
    """
    bench.need_simulation("counts the bytes copied")
    pipeline = bench.fresh()
    components = bench.components(pipeline)
    names = [use.path for use in bench.reference.uses]
    loads = [path for path, before in zip(names, [None, *names], strict=False) if path != before]
    weights = sum(_bytes_of_load(bench, pipeline, bench.group(pipeline, path)) for path in loads) + _bytes_of_blocks(bench, pipeline)
    weights += sum(bench.reference.recast.get(path, 0) for path in loads)  # what a call casts is loaded in that type
    for pin in (True, False):
        with bench.enabled(pipeline, pin_memory=pin):
            if pin or bench.block_paths or bench.exhaustive:
                bench.call(pipeline, keep=False)  # the first call is one in which nothing was known of the order yet
            before = bench.traffic() or (0, 0)
            with copied_back(components.values(), bench) as back:
                bench.call(pipeline, keep=False)
            after = bench.traffic() or (0, 0)
            if back:
                bench.fail("no weight copied to the host in a call, as none was written", f"{sum(back)} bytes")
            copied_in, copied_out = after[0] - before[0], after[1] - before[1]
            # activations that the pipeline itself sends to a component's device, the host's, come back
            most = weights + (bench.reference.copied_in or 0) + copied_out + _SLACK
            if copied_in > most:
                bench.fail(f"at most {most} bytes copied to the device in a call, for {len(loads)} loads", copied_in)
            before = bench.traffic() or (0, 0)
        after = bench.traffic() or (0, 0)
        if after[1] > before[1] and not bench.staying(pipeline):
            bench.fail("nothing copied to the host by disable, as nothing was written", after[1] - before[1])


def _bytes_of_load(bench: Bench, pipeline: Any, paths: set[str]) -> int:
    components, streaming = bench.components(pipeline), bench.layouts(pipeline)
    whole = device_size([components[path] for path in paths & components.keys() - streaming.keys()])
    there = [streaming[path] for path in paths & streaming.keys()]
    return whole + sum(layout.rest + layout.slots_bytes for layout in there)  # with blocks for a pass that does not come


def _bytes_of_blocks(bench: Bench, pipeline: Any) -> int:
    sizes = {path: nbytes for layout in bench.layouts(pipeline).values() for path, nbytes in layout.blocks.items()}
    return sum(sizes[use.name.removesuffix(".forward")] for use in bench.block_uses) if sizes else 0


def check_report(bench: Bench) -> None:
    """The report names every component with its bytes and its loads, and tells the bytes that were copied."""
    pipeline = bench.fresh()
    before = bench.traffic()
    with bench.enabled(pipeline) as backend:
        bench.call(pipeline)
        report, after = backend.report(), bench.traffic()
    if report is None or not report.components:
        bench.fail("a report with a line for each component", report)
    totals = report.totals
    used = {use.path for use in bench.reference.uses}
    components = bench.components(pipeline)
    needed = sum(device_size([components[path]], alignment=1) for path in components) - 512 * len(components)
    if totals["weight_bytes"] < needed:
        bench.fail(f"a report over all {needed} bytes of weights", totals["weight_bytes"])
    if totals["loads"] < len(used):
        bench.fail(f"at least {len(used)} loads in the report, one for each component that was used", totals["loads"])
    if before is not None and after is not None:
        # activations go to the device too, and those that the pipeline sends to a component's device come back
        activations = (bench.reference.copied_in or 0) + after[1] - before[1] + _SLACK
        copied, told = after[0] - before[0], totals["bytes_in"]
        if not copied - activations <= told <= copied:
            bench.fail(f"{copied - activations} to {copied} bytes copied to the device in the report", told)
    if str(report.device) != str(bench.device) or not report.to_json() or not str(report):
        bench.fail(f"a report on {bench.device}", report.device)
