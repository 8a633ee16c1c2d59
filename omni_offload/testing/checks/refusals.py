"""What cannot be right is refused, with an error of ours, before anything moves."""

from typing import Any

import torch

from omni_offload.errors import OffloadStateError
from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.checks.residency import replay
from omni_offload.testing.checks.weights import first_weight, probes
from omni_offload.testing.observe import Target, copied_to, watching
from omni_offload.testing.snapshot import Snapshot

__all__ = ["check_autograd", "check_foreign_offload", "check_stray_use", "check_to_device"]

_THEIRS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")


def check_foreign_offload(bench: Bench) -> None:
    """Another library's offload and ours refuse each other, with nothing touched."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    components = bench.components(pipeline)
    module = next(iter(components.values()))
    module._hf_hook = object()  # type: ignore[assignment]  # noqa: SLF001  (where accelerate keeps its hook)
    before = Snapshot(components, pipeline)
    try:
        bench.enable(pipeline)
    except OffloadStateError:
        bench.require_unchanged(before, when="after a refusal")
        bench.require_disabled(pipeline, base, pinned, when="after a refusal")
    else:
        bench.fail("OffloadStateError where a component has accelerate's hook", "no error")
    del module._hf_hook  # noqa: SLF001  (as above)
    with bench.enabled(pipeline):
        for name in _THEIRS:
            if not callable(getattr(pipeline, name, None)):
                continue
            arguments = {"onload_device": bench.device} if name == "enable_group_offload" else {"device": bench.device}
            try:
                getattr(pipeline, name)(**arguments)
            except OffloadStateError:
                continue
            bench.fail(f"OffloadStateError from {name}() while enabled", "no error")
        bench.require_equal(bench.call(pipeline), when="after refused offload of another library")


def check_to_device(bench: Bench) -> None:
    """pipeline.to(device) is refused while enabled, with nothing touched, and works again after disable."""
    pipeline = bench.fresh()
    if not callable(getattr(pipeline, "to", None)):
        raise NotRun(f"{type(pipeline).__name__} has no to()")
    base = bench.allocated()
    with bench.enabled(pipeline):
        for asked in (bench.device, "cpu"):
            try:
                pipeline.to(asked)
            except OffloadStateError:
                continue
            bench.fail(f"OffloadStateError from to({str(asked)!r}) while enabled", "no error")
        bench.require_left(pipeline, base, when="after a refused to()")
        bench.require_equal(bench.call(pipeline), when="after a refused to()")
    pipeline.to("cpu")


def check_autograd(bench: Bench) -> None:
    """A use that autograd would record is refused with OffloadStateError, and leaves nothing on the device."""
    pipeline = bench.fresh()
    base = bench.allocated()
    recorded = set()
    for path, module in bench.components(pipeline).items():
        parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
        if parameter is not None:
            parameter.requires_grad = True
            recorded.add(path)
    cpu = torch.device("cpu")
    with bench.enabled(pipeline):
        for target in bench.used(pipeline):
            if bench.component_of(pipeline, target.path) not in recorded:
                continue
            recording = bench.reference.recordings[str(target)]
            try:
                with torch.enable_grad():
                    getattr(target.module, target.method)(*copied_to(recording.args, cpu), **copied_to(recording.kwargs, cpu))
            except OffloadStateError:
                bench.require_left(pipeline, base, when=f"after {target} was refused")
                continue
            bench.fail(f"OffloadStateError from {target} in grad mode with weights that require grad", "no error", component=target.path)
        for target in bench.used(pipeline):
            replay(bench, target, when="under no_grad after a refusal")


def check_stray_use(bench: Bench) -> None:
    """A weight used while its component, or block, is not ends in an OffloadStateError that names it, never in a wrong output."""
    pipeline = bench.fresh()
    user = bench.reference.uses[-1]
    others = (pair for pair in probes(bench, pipeline) if pair[0] not in bench.group(pipeline, user.path))
    strays = [(user.name, path, first_weight(module)) for path, module in others][:1]
    strays += bench.sample(_weights_of_idle_blocks(bench, pipeline), 1)
    if not strays:
        raise NotRun("a call uses one component only")
    for name, owner, weight in strays:
        _require_refusal(bench, pipeline, name, owner, weight)


def _weights_of_idle_blocks(bench: Bench, pipeline: Any) -> list[tuple[str, str, torch.Tensor]]:
    """Return, for each component that streams, its use, itself and a weight that is there only while one of its blocks runs."""
    components = bench.components(pipeline)
    found: list[tuple[str, str, torch.Tensor]] = []
    for path, layout in bench.layouts(pipeline).items():
        use = next((use.name for use in bench.reference.uses if use.path == path), None)
        weights = (weight for name, weight in components[path].named_parameters() if f"{path}.{name}" in layout.travelling)
        weight = next(weights, None)
        if use is not None and weight is not None:
            found.append((use, path, weight))
    return found


def _require_refusal(bench: Bench, pipeline: Any, name: str, owner: str, weight: torch.Tensor) -> None:
    """Require that a call is refused where a use begins with a calculation with a weight that is on the host then."""

    def around(_target: Target, method: Any, args: Any, kwargs: Any) -> Any:
        other = torch.ones(weight.shape, device=bench.device, dtype=weight.dtype)
        other = weight * other
        return method(*args, **kwargs)

    base = bench.allocated()
    targets = [target for target in bench.targets(pipeline) if str(target) == name]
    with watching(targets, around), bench.enabled(pipeline):
        try:
            bench.call(pipeline)
        except OffloadStateError as error:
            if owner not in str(error):
                bench.fail(f"an error that names {owner!r}", str(error), component=owner)
        except RuntimeError as error:
            if not bench.by_hand(pipeline):
                bench.fail(f"OffloadStateError that names {owner!r}", repr(error), component=owner)
            bench.note = "the pipeline owns its offload by hand: the error is torch's"
        else:
            bench.fail("an error where a weight is used outside of its component's or block's use", "none", component=owner)
        bench.require_left(pipeline, base, when="after a stray use")
