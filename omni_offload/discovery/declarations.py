"""What a pipeline class declares, checked when the class is defined."""

import inspect
from collections.abc import Mapping

from omni_offload.discovery.paths import is_path
from omni_offload.discovery.problems import Problems, class_name, nearest
from omni_offload.errors import quoted

__all__ = ["LISTS", "declared_co_residents", "declared_entry_points", "declared_lists", "method_problem", "validate_declarations"]

LISTS = {
    "_encoder_modules": "encoder",
    "_dit_modules": "dit",
    "_vae_modules": "vae",
    "_resident_modules": "resident",
}
"""Each list and the kind of its components, in the order in which a pipeline uses them."""


def declared_lists(source: object, problems: Problems) -> dict[str, tuple[str, ...]]:
    """The lists of a pipeline or of its class.

    Args:
        source: The pipeline or its class; a list that it leaves out is empty.
        problems: Where a list of another type, a path that is none, and one that stands twice are added.

    Returns:
        Kind -> usable paths, each once.
    """
    lists: dict[str, tuple[str, ...]] = {}
    places: dict[str, list[str]] = {}
    for name, kind in LISTS.items():
        value = getattr(source, name, [])
        if not isinstance(value, list | tuple) or not all(is_path(path) for path in value):
            problems.about_config(f"{name} is {quoted(value)}; give a list of dotted paths")
            value = []
        for path in value:
            places.setdefault(path, []).append(name)
        lists[kind] = tuple(dict.fromkeys(path for path in value if places[path][0] == name))
    for path, names in places.items():
        if len(names) > 1:
            problems.about_path(f"path {path!r} stands in {' and in '.join(names)}; list it once")
    for path in places:
        for outer in (outer for outer in places if path.startswith(f"{outer}.")):
            problems.about_path(f"path {path!r} lies inside {outer!r}, which is listed too; list one of them")
    return lists


def validate_declarations(cls: type) -> None:
    """Check what a pipeline class declares: its lists, `_co_resident_modules` and `_offload_entry_points`.

    What it leaves out is not missed here: a class may be meant for further subclassing. One that cannot be called yet, as it has
    neither `__call__` nor `forward`, may name methods under "" that only the pipelines have which it is a part of.

    Args:
        cls: The pipeline class.

    Raises:
        ComponentPathError: A path stands twice or in no list, or a method that is named under "" cannot be a call.
        OffloadConfigError: Only types are wrong. Either way the message names every problem.
    """
    problems = Problems(f"Declarations of {class_name(cls)}")
    paths = [path for group in declared_lists(cls, problems).values() for path in group]
    groups = declared_co_residents(cls, problems)
    entry_points = declared_entry_points(cls, problems)
    if any(hasattr(cls, name) for name in LISTS):
        for path in dict.fromkeys(path for group in groups for path in group if path not in paths):
            problems.about_path(f"_co_resident_modules names {path!r}, in no list; {nearest(path, paths)}")
        for path in entry_points:
            if path and not any(f"{path}.".startswith(f"{outer}.") for outer in paths):
                problems.about_path(f"_offload_entry_points names {path!r}, in no listed component; {nearest(path, paths)}")
    for name in entry_points.get("", ()):
        text = method_problem(cls, name) if _is_callable(cls) or hasattr(cls, name) else None
        if text:
            problems.about_path(f"_offload_entry_points[''] names {name!r}, {text}")
    problems.raise_any()


def _is_callable(cls: type) -> bool:
    return any(name in vars(base) for base in cls.__mro__ for name in ("__call__", "forward"))


def declared_co_residents(source: object, problems: Problems) -> list[tuple[str, ...]]:
    """The well-formed groups of `_co_resident_modules`; the others are added to `problems`."""
    groups = getattr(source, "_co_resident_modules", [])
    if not isinstance(groups, list | tuple):
        problems.about_config(f"_co_resident_modules is {quoted(groups)}; give a list of tuples of paths")
        return []
    found = []
    for group in groups:
        usable = isinstance(group, list | tuple) and all(is_path(path) for path in group)
        if usable and len(set(group)) == len(group) >= 2:
            found.append(tuple(group))
        else:
            problems.about_config(f"_co_resident_modules holds {quoted(group)}; give a tuple of two or more paths, each once")
    return found


def declared_entry_points(source: object, problems: Problems) -> dict[str, tuple[str, ...]]:
    """The well-formed entries of `_offload_entry_points`; the others are added to `problems`."""
    entry_points = getattr(source, "_offload_entry_points", {})
    if not isinstance(entry_points, Mapping):
        problems.about_config(f"_offload_entry_points is {quoted(entry_points)}; give a mapping of path -> method names")
        return {}
    found = {}
    for path, methods in entry_points.items():
        if path != "" and not is_path(path):
            problems.about_config(f"_offload_entry_points has the key {quoted(path)}; give a dotted path, or ''")
        elif not isinstance(methods, list | tuple) or not all(isinstance(name, str) and name for name in methods):
            problems.about_config(f"_offload_entry_points[{quoted(path)}] is {quoted(methods)}; give a tuple of method names")
        else:
            found[path] = tuple(dict.fromkeys(methods))
    return found


def method_problem(owner: object, name: str) -> str | None:
    """What keeps a method from being an entry point.

    Args:
        owner: A module, or a class.
        name: The method's name.

    Returns:
        The rest of a sentence about it; None where it may be one. A generator or coroutine function may not: its work is
        done after it has returned.
    """
    method = getattr(owner, name, None)
    if not callable(method):
        known = [key for key in dir(owner) if not key.startswith("_")]
        return (
            f"which {class_name(owner)} does not have; {nearest(name, known)}"
            if method is None
            else (f"which is a {class_name(method)} on {class_name(owner)}; name a method")
        )
    code = inspect.unwrap(method)
    if inspect.isgeneratorfunction(code) or inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
        return (
            f"a generator or coroutine function of {class_name(owner)}, whose work is done after it has returned; "
            "name a method that returns its result"
        )
    return None
