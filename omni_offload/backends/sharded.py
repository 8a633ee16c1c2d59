"""A component whose blocks are spread over ranks: it streams like any other, and what its blocks hold is gathered."""

import functools
from collections.abc import Callable, Iterator

import torch
from typing_extensions import override

from omni_offload.backends.failures import raise_error
from omni_offload.backends.guard import Guard
from omni_offload.backends.streamed import StreamedResidency
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.discovery import module_at
from omni_offload.errors import OffloadStateError
from omni_offload.plan import PlannedComponent, streamed_blocks
from omni_offload.residency import BlockResidency, Partition, ResidencyContext
from omni_offload.residency.sharded_block import ShardedBlock
from omni_offload.residency.shards import Gatherer, Shard
from omni_offload.residency.tables import leaves_in
from omni_offload.residency.tensors import ALIGNMENT, Entry

__all__ = ["ShardedResidency", "shard"]


class ShardedResidency(StreamedResidency):
    """The rest of a component, whole, and its blocks, of each of which this rank keeps a part. Residents belong to the rest.

    Args:
        partition: The component, its blocks, and which tensors travel with which.
        slots: Device buffers for the blocks.
        name: How messages call it.
        context: What it shares with the pipeline's other components.
        gatherer: The ranks.
    """

    timed_passes = 0  # residents are chosen once, alike on all ranks

    def __init__(self, partition: Partition, *, slots: int, name: str, context: ResidencyContext, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._guard = Guard(name)
        self._ending = False
        self.blocks = []  # none are there yet when the tensors are looked at first
        super().__init__(partition, slots=slots, name=name, context=context)

    @override
    def _make_block(self, index: int) -> BlockResidency:
        return ShardedBlock(self._partition, index, self._context, self.counters, self._gatherer)

    @property
    def shards(self) -> Iterator[tuple[BlockResidency, Shard]]:
        """The blocks of which this rank keeps a part, and the parts."""
        return ((block, block.shard) for block in self.blocks if isinstance(block, ShardedBlock) and block.shard is not None)

    @property
    @override
    def shareable(self) -> bool:
        """Never: the ranks of one pipeline are in step, and two pipelines would have to be as well."""
        return False

    @property
    @override
    def resized(self) -> bool:
        """Never: residents are chosen once, alike on all ranks."""
        return False

    def describe(self) -> Iterator[str]:
        """Yield what has to be equal on all ranks: the schedule, and what its blocks hold."""
        yield f"{self.name}: slots {self.slots} of {self.slot_bytes} bytes, {len(self.ring.blocks)} of {len(self.blocks)} blocks stream"
        for index, block in self.ring.blocks.items():
            yield f"block {index} is {block.name}"
        for _, held in self.shards:
            yield from held.describe()

    @override
    def _select(self, entries: list[Entry]) -> list[Entry]:
        rest = super()._select(entries)
        if not self._ending:
            self._refuse_changes(entries)
        return rest

    def _refuse_changes(self, entries: list[Entry]) -> None:
        present = {id(entry.tensor) for entry in entries}
        for block, held in self.shards:
            kept = {id(tensor) for tensor in held.tensors}
            names = [e.name for e in self._partition.of_block(block.index, entries) if id(e.tensor) not in kept]
            if names or not kept <= present:
                raise OffloadStateError(
                    f"the weights of {block.name} were replaced, or others were added ({', '.join(names) or 'some are gone'}), while this "
                    "rank holds a part of them only; call disable_omni_offload(), change them on every rank alike, and enable it again"
                )

    @override
    def prepare(self, *, keep_origin: bool = False) -> None:
        super().prepare(keep_origin=keep_origin)
        self._guard.install(self._partition.component, self._holding())

    def _holding(self) -> Iterator[torch.nn.Module]:
        """Yield the modules that hold weights of which this rank keeps a part."""
        kept = {id(tensor) for _, held in self.shards for tensor in held.tensors}
        for _, module in self._partition.blocks:
            for part in module.modules():
                if any(id(tensor) in kept for tensor in leaves_in(part)):
                    yield part

    @override
    def restore(self, *, copy_back: bool = False, to_origin: bool = False) -> None:
        self._ending = True
        whole: Callable[[], None] = functools.partial(super().restore, copy_back=copy_back, to_origin=to_origin)
        raise_error(run_cleanup_steps([(f"let {self.name} be copied again", self._guard.remove), (f"restore {self.name}", whole)]))


def shard(pipeline: object, planned: PlannedComponent, *, slots: int, context: ResidencyContext, gatherer: Gatherer) -> ShardedResidency:
    """Return the residency of a component of a pipeline whose blocks are gathered; nothing is moved.

    Raises:
        ComponentPathError: The pipeline has changed since the plan was made, and a path leads nowhere.
    """
    component = module_at(pipeline, planned.path)
    staying = [module_at(pipeline, path) for path in planned.rest_paths]
    partition = Partition(component, streamed_blocks(pipeline, planned), staying, multiple=ALIGNMENT * gatherer.size)
    return ShardedResidency(partition, slots=slots, name=planned.path, context=context, gatherer=gatherer)
