"""How many bytes a module holds."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from omni_offload.discovery import managed_weights_of

__all__ = ["has_address", "plain_tensors", "span_of", "weight_bytes"]


def weight_bytes(module: nn.Module) -> int:
    """The unpadded bytes of a module's parameters and buffers; memory that several of them share counts once.

    Args:
        module: The module; its weights may be anywhere, on the meta device too.

    Returns:
        Bytes; of a distributed parameter its local part's, of a wrapper subclass its inner tensors', of one whose shape is not
        known yet, or that is known to be FSDP2's, none.
    """
    spans: dict[torch.device, list[tuple[int, int]]] = {}
    total = 0
    plain = {id(inner): inner for tensor in managed_weights_of(module) for inner in plain_tensors(tensor)}
    for tensor in plain.values():
        if is_lazy(tensor):
            continue
        if not has_address(tensor):
            total += tensor.numel() * tensor.element_size()
        elif tensor.numel():
            spans.setdefault(tensor.device, []).append(span_of(tensor))
    for found in spans.values():
        reached = 0
        for start, end in sorted(found):
            total += max(end - max(start, reached), 0)
            reached = max(reached, end)
    return total


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last; it has an address, and is not empty."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def has_address(tensor: Tensor) -> bool:
    """Whether a plain tensor's bytes have an address: not those of one that is sparse, nested, fake or on the meta device."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or isinstance(tensor, FakeTensor))


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold the bytes of one: itself, or the inner ones of a wrapper subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a distributed one names its mesh, too
            yield from plain_tensors(inner)
