"""Which bytes travel together: groups that are neighbours on both sides are one copy."""

from collections.abc import Iterator, Sequence

import torch

from omni_offload.residency.group import Group
from omni_offload.residency.tensors import align

__all__ = ["transfers"]


def transfers(groups: Sequence[Group]) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Yield source, target and whether the source is pinned: one copy where neighbours on the device are neighbours in the arena."""
    run: list[Group] = []
    for group in groups:
        if group.nbytes and group.copy is not None and group.master is not None:
            if run and not _neighbours(run[-1], group):
                yield _transfer(run)
                run = []
            run.append(group)
    if run:
        yield _transfer(run)


def _neighbours(first: Group, second: Group) -> bool:
    a, b = first.master, second.master
    if a is None or b is None or first.copy is None or second.copy is None or a.region is None or a.region is not b.region:
        return False
    gap = align(first.nbytes)
    together = b.offset - a.offset == gap and second.copy.offset - first.copy.offset == gap
    return together and first.copy.buffer is second.copy.buffer


def _transfer(run: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor, bool]:
    first, last = run[0], run[-1]
    if first.copy is None or last.copy is None or first.master is None:
        raise RuntimeError("a transfer needs groups that have a master and a device copy")
    if len(run) == 1 or first.master.region is None or first.copy.buffer.raw is None:
        return first.master.raw, first.copy.raw, first.master.pinned
    nbytes = last.copy.offset + last.nbytes - first.copy.offset
    source = first.master.region.raw[first.master.offset : first.master.offset + nbytes]
    target = first.copy.buffer.raw[first.copy.offset : first.copy.offset + nbytes]
    return source, target, first.master.pinned
