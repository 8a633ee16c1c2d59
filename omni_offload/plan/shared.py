"""Weights that several components hold: where one of those streams, they stay with the rest of it."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain

import attrs
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from omni_offload.discovery import Component, Problems, managed_weights_of
from omni_offload.plan.model import PlannedComponent, Treatment
from omni_offload.plan.topology import blocks_at
from omni_offload.plan.weights import has_address, plain_tensors

__all__ = ["keep_shared"]


def keep_shared(pipeline: object, components: Iterable[Component], planned: Sequence[PlannedComponent]) -> tuple[PlannedComponent, ...]:
    """Return what is planned, with the modules in streamed blocks whose weights another component holds too among its `rest_paths`.

    Such weights are one master and one device copy for all that hold them, and are on the device as long as any of those is in
    use: a block's slot is filled with another block before that.

    Args:
        pipeline: The pipeline.
        components: All its components.
        planned: What is to be done with each.
    """
    holders: Counter[Hashable] = Counter()
    for component in components:
        holders.update(set(_places(component.module)) if component.module is not None else ())
    shared = {place for place, number in holders.items() if number > 1}
    if not shared:
        return tuple(planned)
    return tuple(_keep(pipeline, component, shared) if component.treatment is Treatment.STREAM else component for component in planned)


def _keep(pipeline: object, component: PlannedComponent, shared: set[Hashable]) -> PlannedComponent:
    problems = Problems(component.path)  # what leads nowhere is said already
    blocks = (block for path in component.block_paths for block in blocks_at(pipeline, path, problems))
    found = (where for path, block in blocks for where in _within(path, block, shared))
    return attrs.evolve(component, rest_paths=tuple(dict.fromkeys((*component.rest_paths, *found))))


def _within(path: str, module: nn.Module, shared: set[Hashable]) -> Iterator[str]:
    """Yield the paths of the largest modules that hold nothing but shared weights, and of those that hold one beside others."""
    places = set(_places(module))
    if not places & shared:
        return
    own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if places <= shared or not shared.isdisjoint(_places_of(own)):
        yield path
        return
    for name, child in module.named_children():
        yield from _within(f"{path}.{name}", child, shared)


def _places(module: nn.Module) -> Iterator[Hashable]:
    return _places_of(managed_weights_of(module))


def _places_of(tensors: Iterable[torch.Tensor]) -> Iterator[Hashable]:
    """Yield where the bytes of each tensor begin; of one that has no address, or no bytes, which object it is."""
    for plain in (inner for tensor in tensors for inner in plain_tensors(tensor)):
        found = not is_lazy(plain) and has_address(plain) and plain.numel() > 0
        yield (plain.device, plain.data_ptr()) if found else id(plain)
