"""The methods of components that count as work besides `forward`."""

import inspect
from collections.abc import Iterable, Mapping

import attrs
from torch import nn

from omni_offload.discovery.components import Component, find_components
from omni_offload.discovery.declarations import method_problem
from omni_offload.discovery.paths import find_module
from omni_offload.discovery.problems import Problems, class_name, nearest

__all__ = ["EntryPoint", "find_entry_points", "resolve_entry_points"]


@attrs.frozen(kw_only=True)
class EntryPoint:
    """Methods of one module whose calls count as work of a component.

    Args:
        path: Path of the module.
        component: Path of the component that it lies in, or is.
        module: The module.
        methods: Their names.
    """

    path: str
    component: str
    module: nn.Module = attrs.field(eq=attrs.cmp_using(eq=lambda one, other: one is other))
    methods: tuple[str, ...]


def resolve_entry_points(pipeline: object, declared: Mapping[str, tuple[str, ...]]) -> tuple[EntryPoint, ...]:
    """Find the modules and methods that a pipeline declares as entry points.

    Args:
        pipeline: The pipeline.
        declared: Path of a component or of a module in one -> method names. "" (the pipeline itself) is checked, and
            left out of the result; a path whose component is None is skipped.

    Returns:
        The entry points, in declared order.

    Raises:
        ComponentPathError: A path leads nowhere or into no component, or a method is missing, or is a generator or
            coroutine function; the message names every problem.
    """
    problems = Problems(f"Entry points of {class_name(pipeline)}")
    entry_points = find_entry_points(pipeline, declared, find_components(pipeline, problems), problems)
    problems.raise_any()
    return entry_points


def find_entry_points(
    pipeline: object, declared: Mapping[str, tuple[str, ...]], components: Iterable[Component], problems: Problems
) -> tuple[EntryPoint, ...]:
    """As `resolve_entry_points`, for components that were found, with what is wrong added to `problems`."""
    owners = {path: component for component in components for path in (component.path, *component.aliases)}
    entry_points: list[EntryPoint] = []
    for path, methods in declared.items():
        if path == "":
            _check_methods(type(pipeline), "", methods, problems)  # what an object has of its own is no call
            continue
        owner = next((owners[outer] for outer in owners if f"{path}.".startswith(f"{outer}.")), None)
        if owner is None:
            problems.about_path(f"entry points are named for {path!r}, in no listed component; {nearest(path, owners)}")
            continue
        module = find_module(pipeline, path, problems)
        if module is not None:
            _check_methods(module, path, methods, problems)
            entry_points.append(EntryPoint(path=path, component=owner.path, module=module, methods=tuple(dict.fromkeys(methods))))
    return tuple(entry_points)


def _check_methods(owner: object, path: str, methods: Iterable[str], problems: Problems) -> None:
    for name in methods:
        text = method_problem(owner, name) or (_unwrappable(owner, name) if path else None)
        if text:
            problems.about_path(f"entry point {f'{path}.{name}'.removeprefix('.')!r} names a method, {text}")


def _unwrappable(module: object, name: str) -> str | None:
    """The rest of a sentence about a method that nothing in a module's `__dict__` can stand in for; None for any other."""
    if name.startswith("__"):
        return f"a special one of {class_name(module)}, which Python looks up on the class, past any wrapper; name the method that it calls"
    if inspect.isdatadescriptor(inspect.getattr_static(type(module), name, None)):
        return f"which is a property of {class_name(module)}; name a method"
    return None
