"""Weights that several components hold: where one of those streams, they stay with the rest of it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import attrs
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from omni_offload.discovery import Component, Problems, managed_weights_of
from omni_offload.plan.model import PlannedComponent, Treatment
from omni_offload.plan.topology import blocks_at
from omni_offload.plan.weights import has_address, plain_tensors, span_of

__all__ = ["keep_shared"]

#: Device, address of the first byte, address after the last.
_Span = tuple[str, int, int]
#: Where a tensor's bytes are; of one that has no address, or no bytes, the id of the object.
_Place = _Span | int


def keep_shared(pipeline: object, components: Iterable[Component], planned: Sequence[PlannedComponent]) -> tuple[PlannedComponent, ...]:
    """Return what is planned, with the modules in streamed blocks whose weights another component holds too among its `rest_paths`.

    Such weights are one master and one device copy for all that hold them, and are on the device as long as any of those is in
    use: a block's slot is filled with another block before that.

    Args:
        pipeline: The pipeline.
        components: All its components.
        planned: What is to be done with each.
    """
    shared = _shared(component.module for component in components if component.module is not None)
    if not shared:
        return tuple(planned)
    return tuple(_keep(pipeline, component, shared) if component.treatment is Treatment.STREAM else component for component in planned)


def _shared(modules: Iterable[nn.Module]) -> set[_Place]:
    """Return the places of which several modules have bytes, with all that share bytes with those: they are one master."""
    holders: dict[_Place, set[int]] = {}
    for number, module in enumerate(modules):
        for place in _places(module):
            holders.setdefault(place, set()).add(number)
    alone = ([place] for place in holders if isinstance(place, int))
    runs = chain(alone, _overlapping(place for place in holders if not isinstance(place, int)))
    return {place for run in runs if len(set[int]().union(*(holders[place] for place in run))) > 1 for place in run}


def _overlapping(spans: Iterable[_Span]) -> Iterator[Sequence[_Place]]:
    """Yield the spans that overlap, together."""
    run: list[_Span] = []
    reached = 0
    for span in sorted(spans):
        device, first, end = span
        if run and (device != run[0][0] or first >= reached):
            yield run
            run = []
        reached = max(reached, end) if run else end
        run.append(span)
    yield run


def _keep(pipeline: object, component: PlannedComponent, shared: set[_Place]) -> PlannedComponent:
    problems = Problems(component.path)  # what leads nowhere is said already
    blocks = (block for path in component.block_paths for block in blocks_at(pipeline, path, problems))
    found = (where for path, block in blocks for where in _within(path, block, shared))
    return attrs.evolve(component, rest_paths=tuple(dict.fromkeys((*component.rest_paths, *found))))


def _within(path: str, module: nn.Module, shared: set[_Place]) -> Iterator[str]:
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


def _places(module: nn.Module) -> Iterator[_Place]:
    return _places_of(managed_weights_of(module))


def _places_of(tensors: Iterable[torch.Tensor]) -> Iterator[_Place]:
    """Yield where the bytes of each tensor are; of one that has no address, or no bytes, which object it is."""
    for plain in (inner for tensor in tensors for inner in plain_tensors(tensor)):
        found = not is_lazy(plain) and has_address(plain) and plain.numel() > 0
        yield (str(plain.device), *span_of(plain)) if found else id(plain)
