"""What travels to the device, and as which copies: groups that are neighbours on both sides are one copy."""

import itertools
import logging
from collections.abc import Iterator, Sequence

import torch

from omni_offload.accelerator import Accelerator
from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.device import DeviceBuffer, buffers_of
from omni_offload.residency.group import Group
from omni_offload.residency.tensors import align, type_of

__all__ = ["copy_in", "place", "transfers"]

logger = logging.getLogger(__name__)

Transfer = tuple[torch.Tensor, torch.Tensor, bool]


def place(groups: Sequence[Group], accelerator: Accelerator, context: ResidencyContext) -> None:
    """Give groups room on the device: one buffer a type, and one a type for those that the same other residencies know too.

    Groups that all of the same residencies know come and go together, so that no buffer waits for one of its groups alone.

    Raises:
        torch.OutOfMemoryError: As raised; the groups that have room keep it.
    """
    shared: dict[tuple[frozenset[object], str], list[Group]] = {}
    for group in groups:
        if len(group.users) > 1:
            shared.setdefault((frozenset(group.users), type_of(group.entries)), []).append(group)
    own = itertools.groupby((group for group in groups if len(group.users) <= 1), key=lambda group: type_of(group.entries))
    for together in (*(list(alike) for _, alike in own), *shared.values()):
        buffer = DeviceBuffer(accelerator, sum(align(group.nbytes) for group in together), context.meter)
        offset = 0
        for group in together:
            group.place(buffer, offset)
            offset += align(group.nbytes)


def copy_in(groups: Sequence[Group], accelerator: Accelerator, context: ResidencyContext) -> int:
    """Queue the copies of groups that have room on the device; the host does not block (pinned masters).

    The copy stream waits for the last uses of their buffers first. Pageable bytes, for which the host blocks until the copies
    before them are done, go first.

    Returns:
        Bytes on their way.
    """
    for group in groups:
        group.forget()
    buffers = buffers_of(group.copy for group in groups)
    for buffer in buffers:
        buffer.order_after_uses()
    total = 0
    for source, target, pinned in sorted(transfers(groups), key=lambda transfer: transfer[2]):
        context.host.copy(target, source, pinned=pinned)
        total += target.numel()
    ready = accelerator.record_copies()
    for buffer in buffers:
        buffer.ready = ready
    for group in groups:
        group.remember()
    logger.debug("%d bytes to %s", total, accelerator.device)
    return total


def transfers(groups: Sequence[Group]) -> Iterator[Transfer]:
    """Yield source, target and whether the source is pinned: one copy where neighbours on the device are neighbours in the arena."""
    run: list[Group] = []
    for group in groups:
        if group.nbytes:
            if run and not _neighbours(run[-1], group):
                yield _transfer(run)
                run = []
            run.append(group)
    if run:
        yield _transfer(run)


def _neighbours(first: Group, second: Group) -> bool:
    (a, at), (b, then) = (first.master, first.copy), (second.master, second.copy)
    if a is None or b is None or at is None or then is None or a.region is None or a.region is not b.region:
        return False
    gap = align(first.nbytes)
    return at.buffer is then.buffer and then.offset - at.offset == gap == b.offset - a.offset


def _transfer(run: Sequence[Group]) -> Transfer:
    master, first, last = run[0].master, run[0].copy, run[-1].copy
    if master is None or first is None or last is None:
        raise RuntimeError("a transfer needs groups that have a master and a device copy")
    if len(run) == 1 or master.region is None or first.buffer.raw is None:
        return master.raw, first.raw, master.pinned
    nbytes = last.offset + run[-1].nbytes - first.offset
    source = master.region.raw[master.offset : master.offset + nbytes]
    return source, first.buffer.raw[first.offset : first.offset + nbytes], master.pinned
