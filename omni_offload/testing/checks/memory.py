"""How many bytes the device holds, and how many are copied."""

from omni_offload.testing.bench import Bench
from omni_offload.testing.checks.numerics import least_budget
from omni_offload.testing.observe import copied_back, device_size

__all__ = ["check_budget", "check_peak", "check_report", "check_traffic"]

_SLACK = 8192


def check_peak(bench: Bench) -> None:
    """The peak is at most what stays, the largest group of components, and the activations of a resident run."""
    pipeline = bench.fresh()
    components = bench.components(pipeline)
    kinds = {component.kind for component in bench.plan(pipeline).components}
    for keys in ({}, {"components": ["dit"]}) if "dit" in kinds and len(kinds) > 1 else ({},):
        staying = bench.staying(pipeline, **keys)
        allowed = device_size([components[path] for path in staying]) + 512 * len(components)
        allowed += bench.largest_group(pipeline, staying) + bench.reference.activations + _SLACK
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


def check_traffic(bench: Bench) -> None:
    """No weight that was not written is copied back, and each load copies a component's bytes once."""
    bench.need_simulation("counts the bytes copied")
    pipeline = bench.fresh()
    components = bench.components(pipeline)
    names = [use.path for use in bench.reference.uses]
    loads = [path for path, before in zip(names, [None, *names], strict=False) if path != before]
    groups = [bench.group(pipeline, path) for path in loads]
    weights = sum(device_size([components[name] for name in group if name in components]) for group in groups)
    for pin in (True, False):
        with bench.enabled(pipeline, pin_memory=pin):
            with copied_back(components.values(), bench) as back:
                bench.call(pipeline, keep=False)
            if back:
                bench.fail("no weight copied to the host in a call, as none was written", f"{sum(back)} bytes")
            before = bench.traffic() or (0, 0)
            bench.call(pipeline, keep=False)
            after = bench.traffic() or (0, 0)
            copied_in, copied_out = after[0] - before[0], after[1] - before[1]
            # activations that the pipeline itself sends to a component's device, the host's, come back
            most = weights + (bench.reference.copied_in or 0) + copied_out + _SLACK
            if copied_in > most:
                bench.fail(f"at most {most} bytes copied to the device in a call, for {len(loads)} loads", copied_in)
            before = bench.traffic() or (0, 0)
        after = bench.traffic() or (0, 0)
        if after[1] > before[1] and not bench.staying(pipeline):
            bench.fail("nothing copied to the host by disable, as nothing was written", after[1] - before[1])


def check_report(bench: Bench) -> None:
    """The report names every component with its bytes, its loads, and what is on the device now."""
    pipeline = bench.fresh()
    with bench.enabled(pipeline) as backend:
        bench.call(pipeline)
        report = backend.report()
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
    if str(report.device) != str(bench.device) or not report.to_json() or not str(report):
        bench.fail(f"a report on {bench.device}", report.device)
