"""Changes that a user makes while offload is enabled are in force at the next call, exactly once."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch

from omni_offload.errors import OffloadError, OffloadStateError
from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.checks.edits import edit_data
from omni_offload.testing.checks.weights import first_weight, probes, within_uses
from omni_offload.testing.observe import same_values
from omni_offload.testing.snapshot import Snapshot

__all__ = [
    "check_casts",
    "check_casts_within_calls",
    "check_replaced_component",
    "check_shared_component",
    "check_structure",
    "check_user_hooks",
]


class _Adapted(torch.nn.Module):
    """A module with a weight added to it, as adapters do; other attributes are the module's."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.scale = torch.nn.Parameter(torch.full((1,), 0.5, dtype=first_weight(base).dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return output + output * self.scale

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def _adapt(bench: Bench, pipeline: Any) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Put an adapter around one inner module of each component; return parents, names and what stood there."""
    former = []
    for path, component in bench.components(pipeline).items():
        names = bench.reference.probes.get(path, ())
        leaves = [name for name in names if not any(True for _ in component.get_submodule(name).children())]
        linear = [name for name in leaves if type(component.get_submodule(name)) is torch.nn.Linear]
        if not (linear or leaves):
            continue
        holder, _, name = (linear or leaves)[0].rpartition(".")
        parent = component.get_submodule(holder)
        base = component.get_submodule((linear or leaves)[0])
        former.append((parent, name, base))
        adapted = _Adapted(base).train(mode=base.training)
        parent._modules[name] = adapted.to(first_weight(base).device)  # noqa: SLF001  (keeps the order of children)
    return former


def check_structure(bench: Bench) -> None:
    """Modules with new weights put around others between calls, as adapters do, are in force, and so is their removal."""
    resident = bench.fresh()
    bench.to_device(resident)
    _adapt(bench, resident)
    try:
        expected = bench.call(resident)
    except (TypeError, AttributeError) as error:
        raise NotRun(f"the pipeline does not run with adapters around its inner modules: {error}") from error
    for keys in ({}, {"pin_memory": False}):
        pipeline = bench.fresh()
        base, pinned = bench.allocated(), bench.pinned()
        before = Snapshot(bench.components(pipeline))
        with bench.enabled(pipeline, **keys):
            if not keys:
                bench.require_equal(bench.call(pipeline), when="before adapters")
            former = _adapt(bench, pipeline)
            for number in (1,) if keys else (1, 2):
                bench.require_equal(bench.call(pipeline), when=f"of call {number} with adapters", expected=expected)
            bench.require_left(pipeline, base, when="after a call with adapters", count_bytes=not bench.now_staying(pipeline))
            for parent, name, module in former:
                parent._modules[name] = module  # noqa: SLF001  (as above)
            bench.require_equal(bench.call(pipeline), when="after adapters were removed")
            _adapt(bench, pipeline)
        bench.require_disabled(pipeline, base, pinned, when="after adapters were put in and offload disabled")
        for parent, name, module in former:
            parent._modules[name] = module  # noqa: SLF001  (as above)
        bench.require_unchanged(before, when="after adapters and disable", attributes=False)


def check_casts(bench: Bench) -> None:
    """component.to(dtype) between calls casts the weights on the host, and is in force."""
    resident = bench.fresh()
    bench.to_device(resident)
    for module in bench.components(resident).values():
        module.to(torch.float64)
    try:
        expected = bench.call(resident)
    except (RuntimeError, TypeError) as error:
        raise NotRun(f"the pipeline does not run in float64: {str(error).partition(chr(10))[0]}") from error
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    with bench.enabled(pipeline):
        bench.call(pipeline)
        for module in bench.components(pipeline).values():
            module.to(torch.float64)
        bench.require_left(pipeline, base, when="after a cast", times=2, count_bytes=not bench.now_staying(pipeline))
        for number in (1, 2):
            bench.require_equal(bench.call(pipeline), when=f"of call {number} after a cast", expected=expected)
    bench.require_disabled(pipeline, base, pinned, times=2)
    for path, module in bench.components(pipeline).items():
        kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if kinds - {torch.float64}:
            bench.fail("weights in float64 after a cast and disable", kinds, component=path)


def check_casts_within_calls(bench: Bench) -> None:
    """component.to(dtype) in the middle of a call, of the component that runs or of another, is in force at once, and kept."""
    (resident, wanted), (pipeline, weights) = ((made, dict(probes(bench, made))) for made in (bench.fresh(), bench.fresh()))
    bench.to_device(resident)
    with _cast_once(bench, resident):
        expected = [bench.call(resident) for _ in range(2)]
    base, pinned = bench.allocated(), bench.pinned()
    with _cast_once(bench, pipeline):
        with bench.enabled(pipeline):
            for number in range(2):
                bench.require_equal(bench.call(pipeline), when=f"of call {number + 1} with casts in it", expected=expected[number])
            bench.require_left(pipeline, base, when="after a call with casts in it", count_bytes=not bench.now_staying(pipeline))
        bench.require_disabled(pipeline, base, pinned, times=2)
    for path, module in weights.items():
        if not same_values([first_weight(module)], [first_weight(wanted[path])]):
            bench.fail("the weights after disable as they were cast in a call", "others", component=path)


@contextlib.contextmanager
def _cast_once(bench: Bench, pipeline: Any) -> Iterator[None]:
    """At the first use of every component, round its weights and the next one's through float16.

    Components of several types are left alone: a cast makes them one type, and upstream does not run then.
    """
    components = bench.components(pipeline)
    mixed = {path for path, module in components.items() if len({p.dtype for p in module.parameters() if p.is_floating_point()}) > 1}
    if mixed:
        bench.note = f"upstream keeps parts of {', '.join(sorted(mixed))} in another type, which a cast undoes"
    pairs = list(probes(bench, pipeline))
    done: set[str] = set()

    def round_weights(path: str) -> None:
        dtype = first_weight(dict(pairs)[path]).dtype
        if path not in done | mixed and dtype.is_floating_point:
            done.add(path)
            components[path].to(torch.float16).to(dtype)

    def look(path: str, _module: torch.nn.Module) -> None:
        paths = [name for name, _ in pairs]
        for name in (path, paths[(paths.index(path) + 1) % len(paths)]):
            round_weights(name)

    with within_uses(pairs, look):
        yield


def check_replaced_component(bench: Bench) -> None:
    """A component replaced while enabled is in force at the next call, or refused; either way nothing of it is left after disable."""
    resident, pipeline, other = bench.fresh(), bench.fresh(), bench.fresh()
    bench.to_device(resident)
    weighty = dict(probes(bench, resident))
    path = next(use.path for use in reversed(bench.reference.uses) if use.path in weighty)
    for donor in (resident, other):
        edit_data(first_weight(dict(probes(bench, donor))[path]))
    expected = bench.call(resident)
    base, pinned = bench.allocated(), bench.pinned()
    before = Snapshot(bench.components(other))
    with bench.enabled(pipeline):
        bench.call(pipeline)
        former = operator.attrgetter(path)(pipeline)
        _replace(pipeline, path, operator.attrgetter(path)(other))
        try:
            for number in (1, 2):
                bench.require_equal(bench.call(pipeline), when=f"of call {number} with {path} replaced", expected=expected)
        except OffloadStateError as error:
            bench.note = f"refused: {error}"
            _replace(pipeline, path, former)
            bench.require_equal(bench.call(pipeline), when="with the component put back")
    bench.require_disabled(pipeline, base, pinned, times=2)
    bench.require_unchanged(before, when="of the new component, after disable", attributes=False)
    if any(tensor.device.type != "cpu" for tensor in former.state_dict().values()):
        bench.fail("the former component on the host", "weights on the device", component=path)


def _replace(pipeline: Any, path: str, module: torch.nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    setattr(operator.attrgetter(holder)(pipeline) if holder else pipeline, name, module)


def check_shared_component(bench: Bench) -> None:
    """Two pipelines that share a component both work and end one by one, or the second is refused with nothing touched."""
    first, second = bench.fresh(), bench.fresh()
    path = bench.reference.uses[0].path
    _replace(second, path, operator.attrgetter(path)(first))
    base, pinned = bench.allocated(), bench.pinned()
    before = Snapshot({**bench.components(second), f"{path} (first)": operator.attrgetter(path)(first)}, second)
    with bench.enabled(first) as backend:
        bench.require_equal(bench.call(first), when="before the other is enabled")
        try:
            with bench.enabled(second):
                for pipeline in (second, first, second):
                    bench.require_equal(bench.call(pipeline), when=f"of two pipelines that share {path}")
        except OffloadError as error:
            bench.note = f"refused: {error}"
        if not backend.is_enabled():
            bench.fail("the first pipeline to be enabled after the other was disabled", "it is not")
        bench.require_equal(bench.call(first), when="after the other was disabled")
    bench.require_unchanged(before, when="after both were disabled", attributes=False)
    bench.require_disabled(first, base, pinned, times=2)


def check_user_hooks(bench: Bench) -> None:
    """Users' torch hooks run once a use, and a method that another library wraps while enabled keeps its wrapper after disable."""
    pipeline = bench.fresh()
    target = next(t for t in bench.used(pipeline) if t.path in bench.components(pipeline))
    seen: list[str] = []
    with bench.enabled(pipeline):
        handle = target.module.register_forward_hook(lambda *_: seen.append("hook"))
        hooked = getattr(target.module, target.method)

        def other(*args: Any, **kwargs: Any) -> Any:
            seen.append("wrapper")
            return hooked(*args, **kwargs)

        vars(target.module)[target.method] = other
        bench.require_equal(bench.call(pipeline), when="with another library's wrapper")
        during = list(seen)
    if vars(target.module).get(target.method) is not other:
        bench.fail("another library's wrapper in its place after disable", "it is gone", component=target.path)
    with torch.no_grad():
        pipeline(**bench.inputs(pipeline))
    uses = sum(use.name == str(target) for use in bench.reference.uses)
    if during.count("wrapper") != uses or seen.count("wrapper") != 2 * uses:
        bench.fail(f"{uses} uses of a wrapper in a call, and as many after disable", seen.count("wrapper"), component=target.path)
    if target.method == "forward" and during.count("hook") != uses:
        bench.fail(f"{uses} runs of a user's forward hook", during.count("hook"), component=target.path)
    handle.remove()
    vars(target.module).pop(target.method)
