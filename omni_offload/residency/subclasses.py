"""Tensors whose values lie in inner tensors, as those of quantised weights do, and the local part of one that is distributed over a mesh.

The inner tensors are what is moved: each is a tensor like any other, with a master and a device copy. The outer tensor has no
bytes, but it has a device, which autograd, autocast and its own operators read: it follows its inner ones, as the same object.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Wrapper", "leaves_of", "wrapper_problem"]

Leaf = tuple[str, torch.Tensor]


class Wrapper:
    """One outer tensor and its inner ones. Callers have torch functions of subclasses disabled.

    Attributes:
        name: How messages call it.
        tensor: The outer tensor.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self._inner = list(_inner(tensor))
        self._donors: dict[torch.device, torch.Tensor] = {}

    def changed(self) -> bool:
        """Whether an inner tensor was replaced by another object."""
        return any(getattr(self.tensor, name, None) is not inner for name, inner in self._inner)

    def grown(self) -> bool:
        """Whether it has other inner tensors than it had (slower than `changed`)."""
        return [name for name, _ in self._inner] != [name for name, _ in _inner(self.tensor)]

    def follow(self) -> None:
        """Let the outer tensor be on the device that its first inner one is on; the object and its version counter stay."""
        device = self._inner[0][1].device
        if self.tensor.device != device:
            if device not in self._donors:
                self._donors[device] = _donor(self.tensor, device)
            with torch._C._DisableTorchDispatch():  # noqa: SLF001  (inference tensors would see a detach)
                self.tensor.data = self._donors[device]


def _donor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same kind, size and type on a device, without inner tensors: only its metadata is taken."""
    with torch.inference_mode(mode=tensor.is_inference()):
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  (how every such tensor is made)
            type(tensor), tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, layout=tensor.layout, device=device
        )


def _inner(tensor: Any) -> Iterator[Leaf]:
    names, _ = tensor.__tensor_flatten__()
    found = ((name, getattr(tensor, name)) for name in names)
    return ((name, inner) for name, inner in found if isinstance(inner, torch.Tensor))  # a distributed one names its mesh, too


def leaves_of(name: str, tensor: Any) -> tuple[list[Leaf], list[Wrapper]]:
    """Return the innermost tensors of a tensor with their names, and the wrappers around them, inner ones first."""
    known: torch.Tensor = tensor
    if not is_traceable_wrapper_subclass(tensor):
        return [(name, known)], []
    leaves: list[Leaf] = []
    wrappers: list[Wrapper] = []
    for inner_name, inner in _inner(tensor):
        further, within = leaves_of(f"{name}.{inner_name}", inner)
        leaves += further
        wrappers += within
    return leaves, [*wrappers, Wrapper(name, known)]


def wrapper_problem(tensor: torch.Tensor, wrappers: Sequence[Wrapper]) -> str | None:
    """Say why a tensor with inner ones cannot be moved by moving these; None where it can."""
    if wrappers and tensor.layout is not torch.strided:
        return f"its layout ({tensor.layout}) is not a plain strided one; leave its component unmanaged"
    if any(not list(_inner(wrapper.tensor)) for wrapper in wrappers):
        return "it names no inner tensors, so that there is nothing to move; leave its component unmanaged, or dequantise it"
    return None
