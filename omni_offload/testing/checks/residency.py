"""Which components are on the device, and when."""

import contextlib
from collections.abc import Collection
from typing import Any

import torch

from omni_offload.testing.bench import Bench, NotRun, some
from omni_offload.testing.observe import Target, bytes_on, copied_to, device_size, same_values, tensors_in, tensors_of
from omni_offload.testing.snapshot import Snapshot

__all__ = [
    "check_captured_methods",
    "check_entry_points",
    "check_keep_between_calls",
    "check_on_device",
    "check_release",
    "check_residency",
    "check_unselected_stay",
    "check_work_on_device",
]

_SLACK = 8192


def check_residency(bench: Bench) -> None:
    """While a component is used, the device holds it, its co-residents and what stays, and after the call only what stays."""
    pipeline = bench.fresh()
    base = bench.allocated()
    components, staying = bench.components(pipeline), bench.staying(pipeline)
    stays = device_size([components[path] for path in staying]) + 512 * len(staying)

    def run() -> None:
        with bench.enabled(pipeline):
            bench.call(pipeline, keep=False)
            bench.require_left(pipeline, base, when="after a call")

    handles = [
        module.get_submodule(bench.reference.probes[path][0]).register_forward_pre_hook(_alone(bench, pipeline, path, staying))
        for path, module in components.items()
        if bench.reference.probes.get(path)
    ]
    try:
        uses = bench.count_uses(pipeline, run)
    finally:
        for handle in handles:
            handle.remove()
    if [use.name for use in uses] != [use.name for use in bench.reference.uses]:
        bench.fail("the same uses of components as in a resident run", [use.name for use in uses])
    if not bench.simulated:
        return
    turns = {path: bench.turn(pipeline, bench.group(pipeline, path) - staying) for path in {use.path for use in uses}}
    for use, resident in zip(uses, bench.reference.uses, strict=True):
        held = use.allocated - base - (resident.allocated - bench.reference.start)
        allowed = stays + _SLACK + (turns[use.path] or bench.largest_group(pipeline, staying))
        if held > allowed:
            bench.fail(f"at most {allowed} bytes of weights on the device during {use.name}", f"{held}", component=use.path)


def _alone(bench: Bench, pipeline: Any, path: str, staying: set[str]) -> Any:
    allowed, components = bench.group(pipeline, path) | staying, bench.components(pipeline)
    others = {name: module for name, module in components.items() if name not in allowed}
    shared = {id(tensor) for name in allowed & components.keys() for tensor in tensors_of(components[name]).values()}

    def look(*_: Any) -> None:
        for name, module in others.items():
            tensors = tensors_of(module)
            names = [inner for inner in bytes_on(module, bench.device) if id(tensors[inner]) not in shared]
            if names:
                bench.fail(f"{name} on the host while {path} is used", some(names), component=name)

    return look


def check_work_on_device(bench: Bench) -> None:
    """In a call, every module within a component runs with its weights on the device: no work is done on the host, unseen."""
    pipeline = bench.fresh()
    handles = [
        module.register_forward_pre_hook(_not_on_host(bench, component, f"{component}.{path}"))
        for component, root in bench.components(pipeline).items()
        for path, module in root.named_modules()
        if path and any(True for _ in module.parameters(recurse=False))  # a component's own hooks may run before it is there
    ]
    try:
        with bench.enabled(pipeline):
            bench.call(pipeline, keep=False)
    finally:
        for handle in handles:
            handle.remove()


def _not_on_host(bench: Bench, component: str, path: str) -> Any:
    def look(module: torch.nn.Module, _: Any) -> None:
        on_host = [name for name, parameter in module.named_parameters(recurse=False) if parameter.device.type == "cpu"]
        if on_host:
            bench.fail(
                f"the weights of {path} on the device while it runs (is what called it declared in _offload_entry_points?)",
                f"{some(on_host)} on the host",
                component=component,
            )

    return look


def check_entry_points(bench: Bench) -> None:
    """Every component method that counts as work works outside of a call, again and again, with inputs on the CPU."""
    pipeline = bench.fresh()
    base = bench.allocated()
    left_out = []
    with bench.enabled(pipeline) as backend:
        for target in bench.targets(pipeline):
            if str(target) not in bench.reference.recordings:
                left_out.append(str(target))
                continue
            for time in ("first", "second"):
                replay(bench, target, when=f"of a {time} use outside of a call")
        bench.require_equal(bench.call(pipeline), when="after uses outside of a call")
        bench.require_left(pipeline, base, when="after uses outside of a call, and a call")
        for target in bench.used(pipeline)[:1]:
            replay(bench, target, when="of a use after a call")
        backend.release()
    if left_out:
        bench.note = f"no call uses {', '.join(left_out)}, so that their arguments are not known"


def replay(bench: Bench, target: Target, *, when: str) -> None:
    """Call a method with the recorded arguments, on the CPU, and require what a resident pipeline returns."""
    recording = bench.reference.recordings[str(target)]
    cpu = torch.device("cpu")
    with torch.no_grad():
        result = getattr(target.module, target.method)(*copied_to(recording.args, cpu), **copied_to(recording.kwargs, cpu))
    if not same_values(tensors_in(result), recording.outputs):
        bench.fail(f"the outputs of {target} {when} that equal the resident run's", "others", component=target.path)


def check_captured_methods(bench: Bench) -> None:
    """A method that was taken from a component while enabled is the component's own after disable: on the host, and right."""
    pipeline, other = bench.fresh(), bench.fresh()
    base = bench.allocated()
    with bench.enabled(pipeline):
        captured = {str(target): getattr(target.module, target.method) for target in bench.used(pipeline)}
        bench.call(pipeline, keep=False)
    left, cpu = bench.allocated(), torch.device("cpu")
    bench.reset_peak()
    for target in bench.used(other):
        recording = bench.reference.recordings[str(target)]
        results = []
        for method in (captured[str(target)], getattr(target.module, target.method)):
            with torch.no_grad():
                results.append(tensors_in(method(*copied_to(recording.args, cpu), **copied_to(recording.kwargs, cpu))))
        if not same_values(*results):
            bench.fail(
                f"{target}, captured while enabled, to do after disable what it does without offload", "others", component=target.path
            )
    if bench.peak() > left or left - base > bench.reference.left:
        bench.fail("nothing on the device in a captured method after disable", f"{bench.peak() - base} bytes")


def check_release(bench: Bench) -> None:
    """A component used outside of a call may stay on the device until release(), which frees all that rotates."""
    pipeline = bench.fresh()
    base = bench.allocated()
    with bench.enabled(pipeline) as backend:
        for target in bench.used(pipeline):
            replay(bench, target, when="before release()")
            backend.release()
            bench.require_left(pipeline, base, when=f"after {target} and release()")
        for target in bench.used(pipeline)[:2]:
            replay(bench, target, when="after release()")
    bench.require_disabled(pipeline, base, bench.pinned())


def check_unselected_stay(bench: Bench) -> None:
    """With some kinds of components selected, the others are on the device from enable to disable, and the selected ones rotate."""
    pipeline = bench.fresh()
    planned = bench.plan(pipeline).components
    kinds = list(dict.fromkeys(c.kind for c in planned if c.kind in ("dit", "text_encoder", "vae")))
    if len({c.kind for c in planned}) < 2:
        raise NotRun("all components are of one kind")
    base, pinned = bench.allocated(), bench.pinned()
    before = Snapshot(bench.components(pipeline))
    for kind in kinds:
        staying = bench.staying(pipeline, components=[kind])
        with bench.enabled(pipeline, components=[kind]):
            for when in ("after enable", "after a call"):
                for path in staying:
                    _require_on_device(bench, pipeline, path, when=f"{when} with {kind} selected")
                bench.require_left(pipeline, base, when=f"{when} with {kind} selected")
                if when == "after enable" or bench.exhaustive:
                    bench.require_equal(bench.call(pipeline), when=f"with {kind} selected")
        bench.require_unchanged(before, when=f"after disable with {kind} selected", attributes=False)
        bench.require_disabled(pipeline, base, pinned)


def _require_on_device(bench: Bench, pipeline: Any, path: str, *, when: str, but: Collection[str] = ()) -> None:
    state = bench.components(pipeline)[path].state_dict()
    there = {f"{path}.{name}": tensor.device == bench.device for name, tensor in state.items() if tensor.numel()}
    if streamed := [name for name, on_device in there.items() if on_device and name in but]:
        bench.fail(f"the weights of blocks on the host {when}", some(streamed), component=path)
    if host := [name for name, on_device in there.items() if not on_device and name not in but]:
        bench.fail(f"all of it on {bench.device} {when}", f"on the host: {some(host)}", component=path)


def check_keep_between_calls(bench: Bench) -> None:
    """With keep_between_calls the device holds weights between calls, within the budget, and outputs stay right."""
    pipeline = bench.fresh()
    if bench.by_hand(pipeline):
        raise NotRun("the pipeline owns its model-level offload by hand, and takes no byte budget")
    base, pinned = bench.allocated(), bench.pinned()
    budget = 2 * bench.reference.weights
    allowed = (bench.reference.copied_in or 0) + sum(bench.reference.recast.get(use.path, 0) for use in bench.reference.uses) + _SLACK
    with bench.enabled(pipeline, device_memory=budget, keep_between_calls=True) as backend:
        for number in (1, 2, 3):
            before = bench.traffic()
            bench.require_equal(bench.call(pipeline), when=f"of call {number} with keep_between_calls")
            after = bench.traffic()
            held = bench.allocated() - base
            if held > budget:
                bench.fail(f"at most {budget} bytes held between calls", held)
            if held <= bench.reference.left:
                bench.fail("weights held between calls, where all of them fit the budget", f"{held} bytes")
            if before is None or after is None:
                continue
            # activations that the pipeline itself sends to a component's device, the host's, come back
            copied = after[0] - before[0] - (after[1] - before[1])
            if number > 1 and copied > allowed:
                bench.fail("no weight copied again that was kept", f"{copied} bytes in call {number}")
        backend.release()
        bench.require_left(pipeline, base, when="after release()")
    bench.require_disabled(pipeline, base, pinned)


def _raise(path: str) -> None:
    raise LookupError(path)


def check_on_device(bench: Bench) -> None:
    """Within `with pipeline.on_device(path)` the component is on the device (of what streams, the rest), outside nothing but what stays."""
    pipeline = bench.fresh()
    if not callable(getattr(pipeline, "on_device", None)):
        raise NotRun(f"{type(pipeline).__name__} has no on_device()")
    if bench.by_hand(pipeline):
        raise NotRun("the pipeline owns its model-level offload by hand, and has stages of its own")
    base = bench.allocated()
    travelling = {name for layout in bench.layouts(pipeline).values() for name in layout.travelling}
    turns = {path: bench.turn(pipeline, bench.group(pipeline, path)) for path in bench.components(pipeline)}
    stays = bench.turn(pipeline, bench.staying(pipeline))
    with bench.enabled(pipeline) as backend:
        for path in bench.components(pipeline):
            with pipeline.on_device(path):
                _require_on_device(bench, pipeline, path, when="within on_device", but=travelling)
                held = bench.allocated() - base
            if bench.simulated and held > stays + turns[path] + _SLACK:
                bench.fail(f"at most {stays + turns[path]} bytes on the device within on_device", held, component=path)
            with contextlib.suppress(LookupError), pipeline.on_device(path):
                _raise(path)
            backend.release()
            bench.require_left(pipeline, base, when="after on_device")
        bench.require_equal(bench.call(pipeline), when="after on_device")
