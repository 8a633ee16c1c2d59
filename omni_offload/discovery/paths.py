"""Dotted paths on pipelines, which may be diffusers pipelines, modules or plain objects."""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from torch import nn

from omni_offload.discovery.problems import Problems, class_name, nearest

__all__ = ["all_components", "find_module", "is_path", "module_at", "modules_in", "modules_outside"]

_TORCH_FIELDS = frozenset(vars(nn.Module()))


def is_path(value: object) -> bool:
    """Whether a value is a dotted path: a string of non-empty parts."""
    return isinstance(value, str) and all(value.split("."))


def find_module(root: object, path: str, problems: Problems) -> nn.Module | None:
    """The module at a path.

    Args:
        root: A pipeline, or a module in it.
        path: Dotted; numbers and keys reach into lists and mappings.
        problems: Where a path that leads nowhere, or to something else, is added.

    Returns:
        The module; None where the path leads to None or through it, and where there is a problem.
    """
    holder, walked = root, class_name(root)
    for part in path.split("."):
        if holder is None:
            return None
        try:
            following = _step(holder, part)
        except (AttributeError, LookupError, ValueError):
            problems.about_path(
                f"path {path!r} leads nowhere, as {walked} ({class_name(holder)}) has no {part!r}; "
                f"{nearest(part, _names(holder))}; correct the path"
            )
            return None
        holder, walked = following, f"{walked}.{part}"
    if holder is None or isinstance(holder, nn.Module):
        return holder
    problems.about_path(f"path {path!r} leads to a {class_name(holder)}, not to a torch.nn.Module; correct the path")
    return None


def module_at(root: object, path: str) -> nn.Module:
    """The module at a path that must lead to one.

    Args:
        root: A pipeline, or a module in it.
        path: Dotted; numbers and keys reach into lists and mappings.

    Returns:
        The module.

    Raises:
        ComponentPathError: The path leads nowhere, to something else, or to None.
    """
    problems = Problems(f"Module {path!r} of {class_name(root)}")
    module = find_module(root, path, problems)
    if module is None and not problems.found:
        problems.about_path("it is None; a plan that names it was made for another pipeline, resolve it again")
    problems.raise_any()
    return cast("nn.Module", module)  # None was a problem


def _step(holder: object, part: str) -> object:
    if isinstance(holder, Mapping):
        return holder[part]
    if isinstance(holder, list | tuple):
        return holder[int(part)]
    return getattr(holder, part)


def _names(holder: object) -> list[str]:
    if isinstance(holder, Mapping):
        return [str(key) for key in holder]
    if isinstance(holder, list | tuple):
        return [str(index) for index in range(len(holder))]
    names = (
        [name for name, value in vars(holder).items() if not name.startswith("_") and not callable(value)]
        if hasattr(holder, "__dict__")
        else []
    )
    modules = [name for name, _ in modules_in(holder)]
    return list(dict.fromkeys([*modules, *names]))


def modules_in(holder: object) -> Iterator[tuple[str, nn.Module]]:
    """The modules that an object holds directly: children, attributes, and items of lists and mappings.

    Args:
        holder: A pipeline, or an object in it.

    Yields:
        Dotted name and module; a module that stands at several names comes several times.
    """
    if isinstance(holder, nn.Module):
        yield from ((name, child) for name, child in holder._modules.items() if child is not None)  # noqa: SLF001  (named_children leaves repeated ones out)
    for name, value in getattr(holder, "__dict__", {}).items():
        if isinstance(holder, nn.Module) and name in _TORCH_FIELDS:
            continue
        yield from _modules_at(name, value)
    yield from _modules_at("", _listed_components(holder))


def _modules_at(name: str, value: object) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        if isinstance(item, nn.Module):
            yield f"{name}.{key}".removeprefix("."), item


def _listed_components(holder: object) -> object:
    try:
        return getattr(holder, "components", None)
    except ValueError:  # diffusers' property refuses pipelines with other components than their signature's
        return None


def all_components(pipeline: object) -> dict[str, nn.Module]:
    """Every module that a pipeline holds directly.

    Args:
        pipeline: A pipeline: its children where it is a module, its attributes, and what its `components` mapping lists.

    Returns:
        Name -> module; each module once, under its first name.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in modules_in(pipeline):
        if id(module) not in seen:
            seen.add(id(module))
            found[name] = module
    return found


def modules_outside(component: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Every module of a component that is reached without passing through one of its blocks; a block may hold it, too."""
    seen = {id(block) for block in blocks}
    found, open_ends = list[nn.Module](), [component]
    while open_ends:
        module = open_ends.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            open_ends += module.children()
    return found
