"""What the values of a plan may be: it may have come from a file, or from a planner."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from omni_offload.config import OffloadStrategy
from omni_offload.discovery import is_path
from omni_offload.errors import quoted

__all__ = ["KINDS", "component_problems", "plan_problems"]

KINDS = ("dit", "text_encoder", "encoder", "vae", "resident")
"""The kinds of planned components."""


def component_problems(component: Any) -> list[str]:
    """What is wrong with a `PlannedComponent`.

    Args:
        component: The component; its treatment and transfer are members of their enums already.

    Returns:
        Sentences; none where it is right.
    """
    problems = [f"path is {quoted(component.path)}; give a dotted path"] if not is_path(component.path) else []
    if component.kind not in KINDS:
        problems.append(f"kind is {quoted(component.kind)}; known are {', '.join(KINDS)}")
    for name in ("aliases", "block_paths", "rest_paths"):
        problems.extend(_path_problems(name, getattr(component, name)))
    problems.extend(_number_problems("weight_bytes", component.weight_bytes))
    if component.resident_layers is not None:
        problems.extend(_number_problems("resident_layers", component.resident_layers))
    if not isinstance(component.reason, str):
        problems.append(f"reason is {quoted(component.reason)}; give a string")
    if not isinstance(component.on_demand, bool):
        problems.append(f"on_demand is {quoted(component.on_demand)}; give True or False")
    return problems or _block_problems(component)


def _path_problems(name: str, value: Any) -> list[str]:
    if isinstance(value, tuple) and all(is_path(path) for path in value) and len(set(value)) == len(value):
        return []
    return [f"{name} is {quoted(value)}; give a list of dotted paths, each once"]


def _number_problems(name: str, value: Any) -> list[str]:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return []
    return [f"{name} is {quoted(value)}; give an int >= 0"]


def _block_problems(component: Any) -> list[str]:
    streams = component.treatment.value == "stream"
    if streams != bool(component.block_paths):
        return [f"treatment is {component.treatment.value!r} with block_paths {component.block_paths!r}; blocks are for what streams"]
    places = tuple(f"{path}." for path in (component.path, *component.aliases))
    outside = [path for path in (*component.block_paths, *component.rest_paths) if not path.startswith(places)]
    return [f"{path!r} lies outside component {component.path!r}; name what is in it" for path in outside]


def plan_problems(plan: Any) -> list[str]:
    """What is wrong with a `ResolvedOffloadPlan`.

    Args:
        plan: The plan; its components are right, each for itself.

    Returns:
        Sentences; none where it is right.
    """
    problems = []
    if not isinstance(plan.pipeline_class, str) or not plan.pipeline_class:
        problems.append(f"pipeline_class is {quoted(plan.pipeline_class)}; give a module and a name")
    if plan.strategy is not plan.config.strategy or plan.strategy is OffloadStrategy.NONE:
        problems.append(
            f"strategy is {quoted(plan.strategy)}, and the configuration's is {quoted(plan.config.strategy)}; give one and the same"
        )
    if not isinstance(plan.components, tuple) or not plan.components:
        return [*problems, f"components is {quoted(plan.components)}; give those to manage"]
    counts = Counter(path for component in plan.components for path in (component.path, *component.aliases))
    problems.extend(f"component {path!r} stands {count} times; name it once" for path, count in counts.items() if count > 1)
    problems.extend(_group_problems(plan.co_residents, {component.path for component in plan.components}))
    problems.extend(_entry_problems(plan.entry_points))
    if not _are_names(plan.call_methods):
        problems.append(f"call_methods is {quoted(plan.call_methods)}; give a list of names")
    return problems


def _group_problems(groups: Any, known: Iterable[str]) -> list[str]:
    if not isinstance(groups, tuple) or not all(_are_names(group) and len(set(group)) == len(group) > 1 for group in groups):
        return [f"co_residents is {quoted(groups)}; give groups of two or more paths, each once"]
    return [f"co_residents names {path!r}, no component of the plan; drop it" for group in groups for path in group if path not in known]


def _entry_problems(entries: Any) -> list[str]:
    usable = isinstance(entries, tuple) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in entries)
    if usable and all(is_path(path) and _are_names(methods) for path, methods in entries):
        return []
    return [f"entry_points is {quoted(entries)}; give pairs of a dotted path and a list of methods"]


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)
