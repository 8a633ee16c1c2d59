"""The tensors among a call's arguments: to the device with them, and which of them autograd follows."""

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

__all__ = ["align_inputs", "tensors_in"]

_SEQUENCES = (list, deque, UserList)


def align_inputs(value: Any, device: torch.device) -> Any:
    """Return a value with every tensor in it on the device.

    Looks into lists, deques, tuples, named tuples, mappings (model outputs too), dataclasses and classes of attrs; other objects are
    passed on as they are.
    A container is rebuilt only where a tensor in it has to move, so that a cache that the callee fills stays the caller's
    object. The copy blocks the host where the source is pageable.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    items = _items(value)
    moved = {key: new for key, item in items.items() if (new := align_inputs(item, device)) is not item}
    if not moved:
        return value
    if isinstance(value, tuple):
        changed = [moved.get(index, item) for index, item in items.items()]
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    if isinstance(value, MappingProxyType):
        return MappingProxyType({**value, **moved})
    rebuilt = copy.copy(value)
    for key, new in moved.items():
        if isinstance(rebuilt, (MutableMapping, *_SEQUENCES)):
            rebuilt[key] = new
        else:
            object.__setattr__(rebuilt, key, new)  # also where its class is frozen
    return rebuilt


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, as far as `align_inputs` looks."""
    if isinstance(value, torch.Tensor):
        yield value
    for item in _items(value).values():
        yield from tensors_in(item)


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, MutableMapping | MappingProxyType):
        return value
    if isinstance(value, _SEQUENCES) or type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if attrs.has(type(value)):
        return {field.name: getattr(value, field.name, None) for field in attrs.fields(type(value))}
    return {}
