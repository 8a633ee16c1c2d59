"""Other libraries' offloading: two owners of one weight cannot both be right."""

from collections.abc import Iterator
from typing import Any

import torch

from omni_offload.discovery import module_at, named_modules_of
from omni_offload.errors import ComponentPathError, OffloadStateError

__all__ = ["refuse_foreign_offload"]


def refuse_foreign_offload(pipeline: Any) -> None:
    """Raise where accelerate's or diffusers' offloading, or a device map, is on for a pipeline.

    Raises:
        OffloadStateError: Names what was found and how to switch it off.
    """
    found = list(dict.fromkeys(_found(pipeline)))
    if found:
        raise OffloadStateError(
            f"offloading was asked for on {type(pipeline).__name__}, but other offloading is on: {'; '.join(found)}. Call "
            "remove_all_hooks() or reset_device_map(), or build the pipeline without it"
        )


def _found(pipeline: Any) -> Iterator[str]:
    if getattr(pipeline, "hf_device_map", None):
        yield f"the pipeline has a device_map ({pipeline.hf_device_map})"
    for name, component in _components(pipeline).items():
        for path, module in named_modules_of(component, name):
            what = _offloading(module)
            if what is not None:
                yield f"{path} has {what}"
                break


def _offloading(module: torch.nn.Module) -> str | None:
    state = module.__dict__
    if state.get("_hf_hook") is not None:
        return f"accelerate's {type(state['_hf_hook']).__name__}"
    if "group_offloading" in getattr(state.get("_diffusers_hook"), "hooks", {}):
        return "diffusers' group offloading"
    return "a device_map" if state.get("hf_device_map") else None


def _components(pipeline: Any) -> dict[str, torch.nn.Module]:
    if isinstance(pipeline, torch.nn.Module):
        return {type(pipeline).__name__: pipeline}
    lists = [getattr(pipeline, f"_{kind}_modules", ()) for kind in ("dit", "encoder", "vae", "resident")]
    paths = [path for found in lists if isinstance(found, list | tuple) for path in found if isinstance(path, str)]  # else a plan says so
    declared = {path: _module(pipeline, path) for path in paths}
    named = {**getattr(pipeline, "__dict__", {}), **declared}
    return {str(name): value for name, value in named.items() if isinstance(value, torch.nn.Module)}


def _module(pipeline: Any, path: str) -> Any:
    try:
        return module_at(pipeline, path)
    except ComponentPathError:  # the plan names it
        return None
