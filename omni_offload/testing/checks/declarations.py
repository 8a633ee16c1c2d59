"""What a pipeline declares and offers."""

import inspect
import operator
import warnings
from typing import Any

import torch

from omni_offload.discovery import all_components, discover_components
from omni_offload.protocols import supports_component_discovery, supports_model_cpu_offload
from omni_offload.testing.bench import Bench
from omni_offload.testing.observe import same_values

__all__ = ["check_case", "check_discovery", "check_plan", "check_protocols", "check_signatures"]


def check_case(bench: Bench) -> None:
    """The case is repeatable: fresh pipelines share nothing, and two fresh ones give equal, finite outputs, without offload."""
    first, second = bench.fresh(), bench.fresh()
    ours, theirs = ({id(t) for m in bench.components(p).values() for t in m.parameters()} for p in (first, second))
    if first is second or ours & theirs:
        bench.fail("make_pipeline to return fresh pipelines", "two that share weights")
    if not bench.reference.outputs:
        bench.fail("outputs to return tensors", "none")
    if not all(tensor.isfinite().all() for tensor in bench.reference.outputs):
        bench.fail("finite outputs without offload", "NaN or infinity, which equal whatever goes wrong")
    bench.to_device(second)
    for what in ("of another fresh pipeline", "of a second call"):
        if not same_values(bench.call(second), bench.reference.outputs):
            bench.fail(f"a deterministic case: outputs {what}, without offload, that equal the first", "others; seed what is random")


def check_protocols(bench: Bench) -> None:
    """The pipeline lists its components, and its pair of methods takes the protocol's arguments by keyword."""
    pipeline = bench.fresh()
    if not supports_component_discovery(pipeline):
        bench.fail("_dit_modules, _encoder_modules and _vae_modules on the class", "at least one is missing")
    if not supports_model_cpu_offload(pipeline):
        bench.fail("the methods enable_omni_model_cpu_offload and disable_omni_model_cpu_offload", "at least one is missing")
    arguments: dict[str, Any] = {"device": bench.device, "pin_memory": True, "use_hsdp": False}
    for given in (arguments, {**arguments, "offload_components": None}):
        try:
            inspect.signature(pipeline.enable_omni_model_cpu_offload).bind(**given)
        except TypeError as error:
            bench.fail(f"enable_omni_model_cpu_offload to take {', '.join(given)} by keyword", error)
    try:
        inspect.signature(pipeline.disable_omni_model_cpu_offload).bind()
    except TypeError as error:
        bench.fail("disable_omni_model_cpu_offload to take no argument", error)


def check_discovery(bench: Bench) -> None:
    """Every module with parameters stands in a list, every declared path resolves, and every entry point is a method."""
    pipeline = bench.fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = discover_components(pipeline)
    listed = {id(component.module) for component in found}
    for name, module in all_components(pipeline).items():
        inner = {id(part) for part in module.modules()}
        if any(True for _ in module.parameters()) and not inner & listed:
            bench.fail("every module with parameters in one of the lists", f"{name} in none", component=name)
    if not bench.components(pipeline):
        bench.fail("a component with weights", "none")
    for target in bench.targets(pipeline):
        if not callable(getattr(target.module, target.method, None)):
            bench.fail(f"a method {target.method}", "none", component=target.path)


def check_plan(bench: Bench) -> None:
    """The declarations resolve to a plan in mode `module` and in mode `layer`, and resolving touches nothing."""
    pipeline = bench.fresh()
    bench.plan(pipeline, mode="module")
    declared = getattr(pipeline, "_offload_plan", None)
    if declared is None:
        bench.note = "no _offload_plan: mode layer was not resolved"
        return
    plan = bench.plan(pipeline, mode="layer")
    for component in plan.components:
        for path in component.block_paths:
            if not isinstance(operator.attrgetter(path)(pipeline), torch.nn.Module):
                bench.fail(f"a module at {path}", "something else", component=component.path)
    if whole := bench.not_streaming(pipeline):
        bench.note = f"in mode layer these move as a whole: {', '.join(f'{path} ({why})' for path, why in whole.items())}"


def check_signatures(bench: Bench) -> None:
    """Enabling changes the signature of no method."""
    pipeline = bench.fresh()
    targets = bench.targets(pipeline)
    before = {str(target): inspect.signature(getattr(target.module, target.method)) for target in targets}
    call = inspect.signature(pipeline.__call__)
    with bench.enabled(pipeline):
        for target in targets:
            now = inspect.signature(getattr(target.module, target.method))
            if now != before[str(target)]:
                bench.fail(f"the signature {before[str(target)]} of {target}", now, component=target.path)
        if inspect.signature(pipeline.__call__) != call:
            bench.fail(f"the signature {call} of the pipeline's call", inspect.signature(pipeline.__call__))
