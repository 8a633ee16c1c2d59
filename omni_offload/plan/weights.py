"""How many bytes a module holds."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["weight_bytes"]


def weight_bytes(module: nn.Module) -> int:
    """The unpadded bytes of a module's parameters and buffers; memory that several of them share counts once.

    Args:
        module: The module; its weights may be anywhere, on the meta device too.

    Returns:
        Bytes; of a sharded parameter its local shard's, of a wrapper subclass its inner tensors', of one whose shape is not
        known yet none.
    """
    spans: dict[torch.device, list[tuple[int, int]]] = {}
    total = 0
    plain = {id(inner): inner for tensor in chain(module.parameters(), module.buffers()) for inner in _plain(tensor)}
    for tensor in plain.values():
        if is_lazy(tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or isinstance(tensor, FakeTensor):
            total += tensor.numel() * tensor.element_size()
        elif tensor.numel():
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            spans.setdefault(tensor.device, []).append((start, start + (last + 1) * tensor.element_size()))
    for found in spans.values():
        reached = 0
        for start, end in sorted(found):
            total += max(end - max(start, reached), 0)
            reached = max(reached, end)
    return total


def _plain(tensor: Any) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))
