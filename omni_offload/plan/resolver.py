"""From a configuration and a pipeline to the one plan, without touching either."""

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from omni_offload.config import OffloadConfig, OffloadStrategy
from omni_offload.discovery import (
    Component,
    Problems,
    class_name,
    declared_co_residents,
    declared_entry_points,
    find_components,
    find_entry_points,
    look_for_fsdp,
    nearest,
    weights_of,
)
from omni_offload.plan.declared import check_plan, pipeline_plan
from omni_offload.plan.model import PlannedComponent, ResolvedOffloadPlan, Treatment
from omni_offload.plan.shared import keep_shared
from omni_offload.plan.streamed import parameters_of, taken_problems
from omni_offload.plan.topology import check_ownership
from omni_offload.plan.treatment import ComponentPlanner

__all__ = ["resolve_again", "resolve_offload_plan", "streamed_parameters"]


def resolve_offload_plan(pipeline: object, config: OffloadConfig) -> ResolvedOffloadPlan:
    """Decide what is done with every component of a pipeline. Nothing is touched.

    Args:
        pipeline: A diffusers pipeline, a module or a plain object.
        config: The configuration.

    Returns:
        The plan.

    Raises:
        ComponentPathError: A declared path leads nowhere or to something else, or a module that holds parameters stands in
            no list.
        OffloadConfigError: The configuration cannot be served: strategy NONE, weights to be moved that FSDP2 owns, a block owned
            twice, a stack of one block asked for, options for what does not stream, nothing to stream, no bytes to manage. Either way
            the message names every problem.
    """
    return _resolve(pipeline, config, served=True)


def resolve_again(pipeline: object, config: OffloadConfig) -> ResolvedOffloadPlan:
    """As `resolve_offload_plan`, for a pipeline that is managed already and may lack components now: not all asked for need be there."""
    return _resolve(pipeline, config, served=False)


def _resolve(pipeline: object, config: OffloadConfig, *, served: bool) -> ResolvedOffloadPlan:
    problems = Problems(f"Offload ({config.strategy.value}) of {class_name(pipeline)}")
    components = find_components(pipeline, problems)
    plan = pipeline_plan(pipeline, problems)
    check_plan(pipeline, plan, components, problems)
    _check_initialised(components, problems)
    for root in [pipeline, *(component.module for component in components)]:
        if isinstance(root, nn.Module):
            look_for_fsdp(root)
    planner = ComponentPlanner(pipeline=pipeline, config=config, plan=plan, problems=problems)
    planned = keep_shared(pipeline, components, [planner.plan_component(component) for component in components])
    check_ownership(planner.blocks, problems)
    if served and not problems.found:
        for problem in taken_problems(pipeline, config, components, planned):
            problems.about_config(problem)
    if served:
        _check_served(config, planned, problems)
    kept = tuple(component for component in planned if component.weight_bytes)
    groups = _co_residents(declared_co_residents(pipeline, problems), components, kept, problems)
    declared = declared_entry_points(pipeline, problems)
    entry_points = find_entry_points(pipeline, declared, components, problems)
    problems.raise_any()
    return ResolvedOffloadPlan(
        pipeline_class=f"{type(pipeline).__module__}.{type(pipeline).__qualname__}",
        strategy=config.strategy,
        config=config,
        components=kept,
        co_residents=groups,
        entry_points=tuple((entry.path, entry.methods) for entry in entry_points),
        call_methods=declared.get("", ()),
    )


def _check_initialised(components: Iterable[Component], problems: Problems) -> None:
    for component in components:
        if component.module is not None and any(map(is_lazy, weights_of(component.module))):
            weights = (*component.module.named_parameters(), *component.module.named_buffers())
            names = [f"{component.path}.{name}" for name, tensor in weights if is_lazy(tensor)]
            problems.about_config(f"{', '.join(names)} have no shape yet, so that no bytes can be counted; run {component.path!r} once")


def _check_served(config: OffloadConfig, planned: tuple[PlannedComponent, ...], problems: Problems) -> None:
    if config.strategy is OffloadStrategy.NONE:
        problems.about_config("strategy NONE plans nothing; name a mode, such as 'module' or 'layer'")
        return
    layers = config.strategy is not OffloadStrategy.MODEL_LEVEL
    streaming = {component.kind for component in planned if component.treatment is Treatment.STREAM}
    for kind, options in config.layer_options.items() if layers else ():
        asked = options.resident_layers or options.weight_transfer or options.checkpoint
        if asked and kind not in streaming:
            problems.about_config(f"layer_options has options for {kind!r}, of which nothing streams; drop them")
    if problems.found:
        return
    if layers and config.components is None and not streaming:
        dits = ", ".join(component.path for component in planned if component.kind == "dit") or "(none)"
        problems.about_config(
            f"there is nothing to stream: no stack of two or more blocks is declared for its DiTs ({dits}); declare "
            "block_attrs in _offload_plan or _layerwise_offload_blocks_attrs on the model, or use mode 'module'"
        )
    elif not any(component.weight_bytes for component in planned if component.treatment is not Treatment.STAY):
        what = ", ".join(f"{c.path} ({c.reason if c.weight_bytes else 'holds no weights'})" for c in planned)
        problems.about_config(f"there are no bytes to manage: {what or 'it lists no components'}; select another kind")


def _co_residents(
    groups: Iterable[tuple[str, ...]],
    components: Iterable[Component],
    kept: Iterable[PlannedComponent],
    problems: Problems,
) -> tuple[tuple[str, ...], ...]:
    names = {path: component.path for component in components for path in (component.path, *component.aliases)}
    moving = {component.path for component in kept if component.treatment is not Treatment.STAY}
    found = []
    for group in groups:
        for path in group:
            if path not in names:
                problems.about_path(f"_co_resident_modules names {path!r}, in no list; {nearest(path, names)}")
        members = tuple(dict.fromkeys(names[path] for path in group if names.get(path) in moving))
        if len(members) > 1:
            found.append(members)
    return tuple(dict.fromkeys(found))


def streamed_parameters(pipeline: object, config: OffloadConfig) -> frozenset[nn.Parameter]:
    """The parameters that stream, for `fully_shard(ignored_params=...)`: every parameter has one owner.

    Args:
        pipeline: The pipeline.
        config: The configuration.

    Returns:
        Parameters of streamed blocks, without those that live in the rest of a component: modules named by
        `rest_submodules`, and parameters that several blocks, or a block and the rest, share.

    Raises:
        ComponentPathError, OffloadConfigError: As `resolve_offload_plan`.
    """
    plan = resolve_offload_plan(pipeline, config)
    return frozenset().union(*(parameters_of(pipeline, component) for component in plan.treated(Treatment.STREAM)))
