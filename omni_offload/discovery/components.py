"""The components of a pipeline."""

import warnings
import weakref
from collections.abc import Iterable, Mapping

import attrs
from torch import nn

from omni_offload.discovery.declarations import LISTS, declared_lists
from omni_offload.discovery.paths import find_module, modules_in
from omni_offload.discovery.problems import Problems, class_name
from omni_offload.discovery.walk import modules_of
from omni_offload.errors import OffloadStateError, listed
from omni_offload.protocols import supports_component_discovery

__all__ = ["WELL_KNOWN", "Component", "discover_components", "find_components", "find_unlisted", "refuse_meta"]

WELL_KNOWN: dict[str, tuple[str, ...]] = {
    "encoder": (
        *("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"),
        *("image_encoder", "image_encoder_2", "vision_encoder", "audio_encoder", "vision_language_encoder", "mllm"),
    ),
    "dit": (
        *("prior", "controlnet", "controlnet_2", "transformer", "transformer_2", "transformer_3", "unet", "unet_2"),
        *("dit", "sr_dit", "language_model", "denoiser", "decoder", "model"),
    ),
    "vae": ("vae", "vae_1", "vae_2", "vqvae", "movq", "vqgan", "audio_vae", "video_vae", "image_vae", "vocoder"),
    "resident": (),
}
"""Kind -> the names under which components of undeclared pipelines are found."""

_WARNED: weakref.WeakSet[type] = weakref.WeakSet()


@attrs.frozen(kw_only=True)
class Component:
    """One component of a pipeline.

    Args:
        path: Its dotted path; the first, where it is listed under several.
        kind: "encoder", "dit", "vae" or "resident".
        module: The module, or None where the pipeline has none at that path.
        aliases: The other paths of the same module.
    """

    path: str
    kind: str
    module: nn.Module | None = attrs.field(eq=attrs.cmp_using(eq=lambda one, other: one is other))
    aliases: tuple[str, ...] = ()


def discover_components(pipeline: object) -> tuple[Component, ...]:
    """The components of a pipeline.

    A pipeline without declarations is searched for well-known names, with one `DeprecationWarning` a class.

    Args:
        pipeline: A diffusers pipeline, a module or a plain object.

    Returns:
        Encoders, DiTs, VAEs and residents, each in declared order; those that are None too.

    Raises:
        ComponentPathError: A path leads nowhere or to something else, two components lie one in the other, or a module
            that holds parameters stands in no list.
        OffloadConfigError: Only types of declarations are wrong. Either way the message names every problem.
    """
    problems = Problems(f"Components of {class_name(pipeline)}")
    components = find_components(pipeline, problems)
    problems.raise_any()
    return components


def find_components(pipeline: object, problems: Problems) -> tuple[Component, ...]:
    """As `discover_components`, with what is wrong added to `problems`."""
    lists = _paths_by_kind(pipeline, problems)
    components: dict[str, Component] = {}
    first: dict[int, str] = {}
    for kind, path in ((kind, path) for kind, paths in lists.items() for path in paths):
        module = find_module(pipeline, path, problems)
        known = None if module is None else components.get(first.setdefault(id(module), path))
        if known is None:
            components[path] = Component(path=path, kind=kind, module=module)
            continue
        components[known.path] = attrs.evolve(known, aliases=(*known.aliases, path))
        if known.kind != kind:
            problems.about_path(f"paths {known.path!r} ({known.kind}) and {path!r} ({kind}) are one module; list it as one kind")
    found = {id(component.module): component for component in components.values() if component.module is not None}
    _check_nesting(found, problems)
    _check_unlisted(pipeline, [path for paths in lists.values() for path in paths], found, problems)
    return tuple(components.values())


def _paths_by_kind(pipeline: object, problems: Problems) -> dict[str, tuple[str, ...]]:
    if supports_component_discovery(pipeline):
        return declared_lists(pipeline, problems)
    missing = [name for name in LISTS if not hasattr(pipeline, name) and name != "_resident_modules"]
    if len(missing) < len(LISTS) - 1:
        problems.about_config(f"{' and '.join(missing)} left out beside other lists; declare them, empty if need be")
        return declared_lists(pipeline, problems)
    lists = {
        kind: tuple(name for name in names if isinstance(getattr(pipeline, name, None), nn.Module)) for kind, names in WELL_KNOWN.items()
    }
    names = [name for paths in lists.values() for name in paths]
    if not names:
        problems.about_path(f"it declares none, and none has a well-known name; declare {', '.join(LISTS)}")
    elif type(pipeline) not in _WARNED:
        _WARNED.add(type(pipeline))
        warnings.warn(
            f"{class_name(pipeline)} declares no components; {', '.join(names)} were found by their names; declare {', '.join(LISTS)}",
            DeprecationWarning,
            stacklevel=2,
        )
    return lists


def _check_nesting(found: Mapping[int, Component], problems: Problems) -> None:
    for outer in found.values():
        inside = [found[id(module)] for module in modules_of(outer.module) if id(module) in found] if outer.module is not None else []
        for inner in inside:
            if inner is not outer:
                problems.about_path(f"component {inner.path!r} lies inside component {outer.path!r}; list one of them")


def _check_unlisted(pipeline: object, paths: Iterable[str], found: Mapping[int, Component], problems: Problems) -> None:
    modules = [component.module for component in found.values() if component.module is not None]
    for name, text in find_unlisted(pipeline, paths, modules).items():
        problems.about_path(f"{name!r} {text} and stands in no list; add it to one of {', '.join(LISTS)}")


def find_unlisted(pipeline: object, paths: Iterable[str], components: Iterable[nn.Module]) -> dict[str, str]:
    """Find what holds parameters outside all components.

    Args:
        pipeline: The pipeline.
        paths: The listed paths.
        components: The modules that they lead to.

    Returns:
        Path -> what it holds; modules that hold a component, and the pipeline itself, only where they hold parameters of their own.
    """
    modules = list(components)
    inside = [part for module in modules for part in modules_of(module)]
    managed = {id(p) for part in inside for p in part._parameters.values()}  # noqa: SLF001  (parameters() looks at each by name)
    search = _Unlisted(listed={id(module) for module in modules}, managed=managed)
    if isinstance(pipeline, nn.Module):
        search.add_own("", pipeline)
    search.add_children("", pipeline)
    for path in paths:  # plain objects on the way to a component hold modules that no attribute of the pipeline shows
        holder: object = pipeline
        parts = path.split(".")
        for depth, part in enumerate(parts[:-1], start=1):
            holder = getattr(holder, part, None)
            if holder is not None and not isinstance(holder, nn.Module):
                search.add_children(".".join(parts[:depth]), holder)
    return search.found


@attrs.define(kw_only=True)
class _Unlisted:
    """A search for modules that hold parameters outside all components."""

    listed: set[int]
    managed: set[int]
    found: dict[str, str] = attrs.field(factory=dict)
    _seen: set[int] = attrs.field(factory=set)

    def add_children(self, prefix: str, holder: object) -> None:
        for name, child in modules_in(holder):
            self._visit(f"{prefix}.{name}".removeprefix("."), child)

    def add_own(self, name: str, module: nn.Module) -> None:
        own = [key for key, p in module.named_parameters(recurse=False) if id(p) not in self.managed]
        if own:
            self.found[name or "(the pipeline itself)"] = f"holds parameters of its own ({', '.join(own)})"

    def _visit(self, name: str, module: nn.Module) -> None:
        if id(module) in self.listed or id(module) in self._seen:
            return
        self._seen.add(id(module))
        if any(id(inner) in self.listed for inner in module.modules()):
            self.add_own(name, module)
            self.add_children(name, module)
        elif any(id(p) not in self.managed for p in module.parameters()):
            self.found[name] = f"({class_name(module)}) holds parameters"


def refuse_meta(modules: Mapping[str, nn.Module], *, pipeline: object) -> None:
    """Refuse modules whose weights were never loaded.

    Args:
        modules: Path -> module.
        pipeline: Whose modules they are, for the message.

    Raises:
        OffloadStateError: Parameters or buffers are on the meta device; the message names them.
    """
    names = [
        f"{path}.{name}"
        for path, module in modules.items()
        for tensors in (module.named_parameters(), module.named_buffers())
        for name, tensor in tensors
        if tensor.is_meta
    ]
    if names:
        raise OffloadStateError(
            f"Offload of {class_name(pipeline)} needs weights, and these are on the meta device, without any: "
            f"{listed(names)}; load them first"
        )
