"""A pipeline's `_offload_plan`, held against its components."""

import inspect
from collections.abc import Collection, Iterable

from omni_offload.config import OffloadPlan
from omni_offload.discovery import Component, Problems, class_name, find_module, nearest

__all__ = ["check_plan", "pipeline_plan"]

_KINDS = {
    "block_attrs": ("dit",),
    "encoder_block_attrs": ("encoder", "vae"),
    "encoder_component_types": ("encoder",),
    "resident_dit_paths": ("dit",),
    "on_demand_component_paths": ("encoder", "dit", "vae", "resident"),
    "encoder_dlo_weight_replication": ("encoder", "vae"),
}
"""Field of the plan -> the kinds of components that its paths may name."""


def pipeline_plan(pipeline: object, problems: Problems) -> OffloadPlan:
    """What a pipeline declares as `_offload_plan`; an empty plan where it declares none."""
    declared = inspect.getattr_static(type(pipeline), "_offload_plan", None)
    try:
        plan = declared.__get__(pipeline) if isinstance(declared, property) else getattr(pipeline, "_offload_plan", None)
    except AttributeError as error:  # by getattr it would pass for a plan that is not declared
        problems.about_config(f"_offload_plan cannot be read: {error}")
        return OffloadPlan()
    if plan is None or isinstance(plan, OffloadPlan):
        return plan or OffloadPlan()
    problems.about_config(f"_offload_plan is a {class_name(plan)}; give an OffloadPlan")
    return OffloadPlan()


def check_plan(pipeline: object, plan: OffloadPlan, components: Iterable[Component], problems: Problems) -> None:
    """Add every path of a plan that names no component of the right kind, or lies in none.

    Args:
        pipeline: The pipeline.
        plan: Its plan.
        components: Its components, those that are None too.
        problems: Where they are added.
    """
    kinds = {path: component.kind for component in components for path in (component.path, *component.aliases)}
    for field, allowed in _KINDS.items():
        known = [path for path, kind in kinds.items() if kind in allowed]
        for path in sorted(getattr(plan, field)):
            if path not in known:
                problems.about_path(f"_offload_plan.{field} names {path!r}, no listed {' or '.join(allowed)}; {nearest(path, known)}")
    dits = [path for path, kind in kinds.items() if kind == "dit"]
    _check_inside(pipeline, "offload_submodules", sorted(plan.offload_submodules), dits, problems)
    _check_inside(pipeline, "rest_submodules", sorted(plan.rest_submodules), kinds, problems)
    for component in components:
        if component.module is not None and component.path in plan.on_demand_component_paths:
            for name in ("load_to_device", "offload_to_cpu"):
                if not callable(getattr(component.module, name, None)):
                    problems.about_path(
                        f"_offload_plan.on_demand_component_paths names {component.path!r}, whose "
                        f"{class_name(component.module)} has no method {name!r}; add it, or drop the path"
                    )


def _check_inside(pipeline: object, field: str, paths: Iterable[str], outer: Collection[str], problems: Problems) -> None:
    for path in paths:
        if any(path.startswith(f"{owner}.") for owner in outer):
            find_module(pipeline, path, problems)
        else:
            problems.about_path(f"_offload_plan.{field} names {path!r}, inside no such component; {nearest(path, outer)}")
