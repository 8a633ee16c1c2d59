"""A pipeline in another floating type, as `from_pretrained(torch_dtype=...)` would load it."""

from collections.abc import Iterator
from typing import Any

import torch

from omni_offload.discovery import discover_components

__all__ = ["cast_pipeline", "type_name"]

_CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def type_name(dtype: torch.dtype) -> str:
    """Return a type's name without the module's: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def cast_pipeline(pipeline: Any, dtype: torch.dtype) -> None:
    """Cast the floating parameters and buffers of every declared component, but what its model keeps in float32.

    diffusers' `to(dtype)` casts that too, and warns that the results are then others than the loaded model's.
    """
    for component in discover_components(pipeline):
        if component.module is not None:
            _cast(component.module, dtype)


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    kept = {
        id(tensor)
        for model in module.modules()
        for parts in [_kept_parts(model, dtype)]
        if parts
        for name, tensor in _tensors(model)
        if parts & {*name.split(".")}
    }
    for _, tensor in _tensors(module):
        if tensor.dtype in _CAST and id(tensor) not in kept:
            tensor.data = tensor.data.to(dtype)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _kept_parts(model: torch.nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the parts of names that a model keeps in float32: transformers keeps fewer for bfloat16 than diffusers."""
    parts = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype is torch.float16 or not hasattr(model, "_keep_in_fp32_modules_strict"):
        parts |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    return parts
