"""Find a registered pipeline: by name, by the folder it was saved to, or for a pipeline that exists."""

import difflib
import json
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omni_offload.errors import OffloadConfigError
from pipelines.catalog import BUILT_IN
from pipelines.entry import PREFIX, PipelineEntry, PipelineLookupError
from pipelines.folder import SavedPipeline, read_folder, refuse_connected, refuse_empty_tokenizers
from pipelines.hub import fetch_index, fetch_model, is_hub_name

__all__ = ["GROUP", "PipelineEntry", "PipelineLookupError", "from_pipe", "from_pretrained", "get", "registered"]

GROUP = "omni_offload.pipelines"
"""Entry-point group through which other packages register: each entry point loads to a `PipelineEntry`."""

_RUNS_CODE = ("custom_pipeline", "trust_remote_code")
_DTYPE_NAMES = ("dtype", "torch_dtype")
_DTYPE_SINCE = (0, 40)
"""The diffusers that takes the first of these names; those before know the second only, those after warn of it."""


def registered() -> Mapping[str, PipelineEntry]:
    """Return every registered pipeline by name, sorted; those of this package and those of installed ones.

    Raises:
        PipelineLookupError: An entry point does not load to a `PipelineEntry`, or a name is registered twice.
    """
    entries = {entry.name: entry for entry in BUILT_IN}
    for point in entry_points(group=GROUP):
        entry = _load_entry(point)
        if entry.name in entries:
            raise PipelineLookupError(
                f"two pipelines are registered as {entry.name!r}: {entries[entry.name].pipeline!r} and "
                f"{entry.pipeline!r} (of entry point {point.name!r}, {_source(point)}): rename one, or uninstall its "
                "package"
            )
        entries[entry.name] = entry
    return MappingProxyType(dict(sorted(entries.items())))


def get(name: str) -> type:
    """Import and return the class that is registered under a name.

    Args:
        name: A key of `registered()`.

    Raises:
        PipelineLookupError: There is no such name; the message lists those that there are.
        ImportError: A package that the pipeline needs is not installed.
    """
    entries = registered()
    if name not in entries:
        close = difflib.get_close_matches(name, entries, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise PipelineLookupError(f"no pipeline is registered as {name!r}{hint}; there are: {', '.join(entries)}")
    return entries[name].load()


def from_pretrained(path: str | Path, **kwargs: Any) -> Any:
    """Load a pipeline that was saved in diffusers' format, as the registered class that stands for it.

    Nothing in the folder is executed, and only safetensors are read: code, pickled weights and modules that the folder names are
    refused before anything is loaded.

    Args:
        path: A local folder with a `model_index.json`, which may name the upstream class or ours; nothing is downloaded for one. Or
            a model on the hub as `owner/model`; nothing is downloaded with `local_files_only=True`.
        kwargs: Passed on to the class's `from_pretrained`: `variant`, `dtype` (under the name that the installed diffusers has for
            it; a type of torch or its name, or one for each component), components that are not to be loaded.

    Raises:
        PipelineLookupError: It is no such folder or model, no pipeline is registered for its class, or it is refused; or it is not
            complete.
        OffloadConfigError: An argument would have code run or pickles read, or `dtype` is no type of weights.
    """
    _refuse_arguments(kwargs)
    if is_hub_name(path):
        cls = _class_for(read_folder(fetch_index(str(path), given=kwargs)), asked=str(path))
        folder = fetch_model(str(path), cls, given=kwargs)
        saved = read_folder(folder)
    else:
        folder = Path(path)
        saved = read_folder(folder)
        cls = _class_for(saved, asked=f"the pipeline in {str(folder)!r}")
    saved.refuse_what_runs(given=kwargs, variant=kwargs.get("variant"), names=_component_names(cls))
    refuse_connected(folder, cls)
    made = cls.from_pretrained(folder, **{"local_files_only": True, **_as_known(kwargs), "use_safetensors": True})
    refuse_empty_tokenizers(folder, {name: getattr(made, name, None) for name in saved.components if name not in kwargs})
    _remember_files(made, saved, kwargs)
    if folder != Path(path):
        made.register_to_config(_name_or_path=str(path))
    return made


def _remember_files(pipeline: Any, saved: SavedPipeline, given: Mapping[str, Any]) -> None:
    """Let each component that was loaded know its files, from which offload may map it."""
    from torch.nn import Module  # noqa: PLC0415  (importing this package imports no torch)

    from omni_offload.residency.checkpoint import remember_files  # noqa: PLC0415  (as above)

    for name in saved.components:
        if name not in given and isinstance(module := getattr(pipeline, name, None), Module):
            remember_files(module, saved.files_read(name, variant=given.get("variant")))


def _component_names(cls: Any) -> frozenset[str]:
    """Return the components that a diffusers pipeline class takes; of another class none are known."""
    return frozenset(cls._get_signature_keys(cls)[0]) if hasattr(cls, "_get_signature_keys") else frozenset()


def _class_for(saved: SavedPipeline, *, asked: str) -> Any:
    return _entry_for(saved.class_name, asked=asked, components=tuple(saved.components)).load()


def _refuse_arguments(kwargs: Mapping[str, Any]) -> None:
    wrong = [f"{name}={kwargs[name]!r}" for name in _RUNS_CODE if kwargs.get(name)]
    if kwargs.get("use_safetensors", True) is not True:
        wrong.append(f"use_safetensors={kwargs['use_safetensors']!r}")
    if wrong:
        raise OffloadConfigError(
            f"from_pretrained was given {', '.join(wrong)}, but it runs no code that a model brings and reads safetensors only: leave "
            "it out; or load the model with plain diffusers, if you trust it, and give that pipeline to from_pipe"
        )


def _as_known(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the type of the weights under the name that the installed diffusers takes without a warning.

    Raises:
        OffloadConfigError: It is no type that weights can have: diffusers would load them in float32 instead.
    """
    kwargs = {key: _dtype_of(key, value) if key in _DTYPE_NAMES else value for key, value in kwargs.items()}
    asked = {key: value for key, value in kwargs.items() if key in _DTYPE_NAMES}
    if len(asked) != 1:
        return dict(kwargs)
    major, minor, *_ = version("diffusers").split(".")
    known = _DTYPE_NAMES[(int(major), int(minor)) < _DTYPE_SINCE]
    return {**{key: value for key, value in kwargs.items() if key not in asked}, known: next(iter(asked.values()))}


def _dtype_of(name: str, value: Any) -> Any:
    """Return the type of the weights that is asked for, also by its name, of all components or of each."""
    import torch  # noqa: PLC0415  (importing this package imports no torch)

    if isinstance(value, Mapping):
        return {component: _dtype_of(f"{name}[{component!r}]", one) for component, one in value.items()}
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if value is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise OffloadConfigError(
            f"from_pretrained was given {name}={value!r}, which is no floating type of torch; give one, such as torch.bfloat16, or its name"
        )
    return found


def from_pipe(pipe: Any, *, pipeline_class: type | None = None) -> Any:
    """Return a pipeline of the registered class over the same component objects, with the same configuration.

    No weight is copied, moved or cast. The original stays usable while the new one is not enabled.

    Args:
        pipe: A pipeline of an upstream class that a registered one stands for.
        pipeline_class: A class that extends the pipe's own; None: the one that is registered for it.

    Raises:
        PipelineLookupError: No pipeline is registered for exactly this class, the class that is given does not extend it, or it is no
            pipeline but a class.
    """
    if isinstance(pipe, type):
        raise PipelineLookupError(f"from_pipe was given {_full_name(pipe)} itself; give a pipeline of that class")
    cls: Any = _registered_for(pipe) if pipeline_class is None else pipeline_class
    if not issubclass(cls, type(pipe)):
        raise PipelineLookupError(f"{_full_name(cls)} does not extend {_full_name(type(pipe))}: the pipe's own methods would be lost")
    components = pipe.components
    config = {key: value for key, value in pipe.config.items() if key not in components}
    _, parameters = cls._get_signature_keys(cls)
    made = cls(**components, **{key: value for key, value in config.items() if key in parameters})
    made.register_to_config(**{key: value for key, value in config.items() if key not in parameters})
    made.set_progress_bar_config(**getattr(pipe, "_progress_bar_config", {}))
    return made


def _registered_for(pipe: Any) -> type:
    """Return the class that is registered for exactly the class of a pipe."""
    upstream = type(pipe)
    entry = _entry_for(upstream.__name__, asked=_full_name(upstream), components=getattr(pipe, "components", ()))
    cls = entry.load()
    if not issubclass(cls, upstream):
        raise PipelineLookupError(
            f"{_full_name(upstream)} has the name that {entry.pipeline!r} stands for, but is "
            f"another class: its own methods would be lost. {_how_to_declare(upstream.__name__, pipe.components)}"
        )
    return cls


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _load_entry(point: EntryPoint) -> PipelineEntry:
    what = f"entry point {point.name!r} = {point.value!r} of group {GROUP!r} ({_source(point)})"
    try:
        entry = point.load()
    except Exception as error:
        raise PipelineLookupError(f"{what} does not load: {error}; repair or uninstall its package") from error
    if not isinstance(entry, PipelineEntry):
        raise PipelineLookupError(f"{what} must be a pipelines.PipelineEntry, not {entry!r}")
    return entry


def _source(point: EntryPoint) -> str:
    return f"package {point.dist.name!r}" if point.dist is not None else "package unknown"


def _entry_for(class_name: str, *, asked: str, components: Collection[str] = ()) -> PipelineEntry:
    """Return the entry of the one class that has a name or stands for it."""
    found: dict[str, PipelineEntry] = {}
    for entry in registered().values():
        if class_name in (entry.class_name, entry.upstream_name):
            found.setdefault(entry.pipeline, entry)
    if not found:
        raise PipelineLookupError(f"no pipeline is registered for {asked}, a {class_name}. {_how_to_declare(class_name, components)}")
    if len(found) > 1:
        raise PipelineLookupError(
            f"{asked} is a {class_name}, and several classes are registered for that: {', '.join(map(repr, found))}; "
            "load one of them by its own from_pretrained"
        )
    return next(iter(found.values()))


def _how_to_declare(class_name: str, components: Collection[str]) -> str:
    """Return the code that declares a pipeline class, with its components as far as they are known."""
    from omni_offload.discovery import LISTS, WELL_KNOWN  # noqa: PLC0415  (importing this package imports no torch)

    upstream = class_name.removeprefix(PREFIX)
    lists = {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"], "_vae_modules": ["vae"]}
    known = {name: [one for one in components if one in WELL_KNOWN[LISTS[name]]] for name in lists}
    lists = known if any(known.values()) else lists
    declared = "".join(f"        {attribute} = {json.dumps(names)}\n" for attribute, names in lists.items() if names)
    return (
        f"To declare one, write\n"
        f"    class {PREFIX}{upstream}(OmniOffloadMixin, {upstream}):\n{declared}"
        f"and register it in your package through the entry-point group {GROUP!r}:\n"
        f'    ENTRY = PipelineEntry("my_model", pipeline="my_package.module:{PREFIX}{upstream}")\n'
        f"`omni-offload scaffold diffusers:{upstream} --case my_package.module:CASE` writes both, with the blocks and the entry points"
    )
