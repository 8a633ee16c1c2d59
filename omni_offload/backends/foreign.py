"""Other libraries' offloading: two owners of one weight cannot both be right."""

import operator
from collections.abc import Iterator
from typing import Any

import torch

from omni_offload.errors import OffloadStateError

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
        for path, module in component.named_modules(prefix=name):
            state = module.__dict__
            if state.get("_hf_hook") is not None:
                yield f"{path} has accelerate's {type(state['_hf_hook']).__name__}"
            elif "group_offloading" in getattr(state.get("_diffusers_hook"), "hooks", {}):
                yield f"{path} has diffusers' group offloading"
            elif state.get("hf_device_map"):
                yield f"{path} has a device_map"
            else:
                continue
            break


def _components(pipeline: Any) -> dict[str, torch.nn.Module]:
    if isinstance(pipeline, torch.nn.Module):
        return {type(pipeline).__name__: pipeline}
    components = getattr(pipeline, "components", None)
    named = components if isinstance(components, dict) else vars(pipeline)
    lists = [getattr(pipeline, f"_{kind}_modules", ()) for kind in ("dit", "encoder", "vae", "resident")]
    named = {**named, **{path: _get(pipeline, path) for paths in lists for path in paths}}
    return {str(name): value for name, value in named.items() if isinstance(value, torch.nn.Module)}


def _get(pipeline: Any, path: str) -> Any:
    try:
        return operator.attrgetter(path)(pipeline)
    except AttributeError:
        return None
