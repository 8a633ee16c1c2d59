"""A component whose blocks stream: the rest of it is loaded like any component, and the ring serves the blocks."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from typing_extensions import override

from omni_offload.backends.arranged import ArrangedResidency
from omni_offload.backends.block_ring import BlockRing
from omni_offload.backends.explain import OnHost
from omni_offload.backends.failures import raise_error
from omni_offload.backends.residents import ResidentChoice
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.config import DLOTransfer
from omni_offload.discovery import module_at
from omni_offload.plan import PlannedComponent, streamed_blocks
from omni_offload.residency import BlockResidency, Partition, ResidencyContext
from omni_offload.residency.checkpoint import files_of, loaded_from
from omni_offload.residency.context import LATE_PIN_BYTES
from omni_offload.residency.managed import unwatched
from omni_offload.residency.mapped import Checkpoint
from omni_offload.residency.tensors import Entry, Placements

__all__ = ["StreamedResidency", "stream"]

_BLOCK_ADVICE = (
    "while its block did not run, so it was on the host; name the module that holds it in rest_submodules of the pipeline's _offload_plan"
)


class StreamedResidency(ArrangedResidency):
    """The rest of a component, and its blocks. Loading brings the rest, and makes the slots; a block is bound while it runs.

    Args:
        partition: The component, its blocks, and which tensors travel with which.
        slots: Device buffers for the blocks.
        name: How messages call it.
        context: What it shares with the pipeline's other components.
    """

    def __init__(self, partition: Partition, *, slots: int, name: str, context: ResidencyContext) -> None:
        self._partition = partition
        self._reselects = False
        super().__init__(partition.component, context.accelerator.device, name=name, context=context)
        self.blocks = [self._make_block(index) for index in range(len(partition.blocks))]
        self.ring = BlockRing(name, context.slots, self.counters)
        self.ring.arrange(self.blocks, limited=False)
        self._slots = slots
        self._choice = ResidentChoice(slots, overlaps=self.pins)

    def _make_block(self, index: int) -> BlockResidency:
        return BlockResidency(self._partition, index, self._context, self.counters)

    @override
    def _select(self, entries: list[Entry]) -> list[Entry]:
        with unwatched():
            self._find_homes(entries)
        return self._partition.of_rest(entries)

    def idle_blocks(self) -> Iterator[OnHost]:
        """Yield the streamed blocks that do not run."""
        for index, block in self.ring.blocks.items():
            if index not in self.ring.running:
                yield OnHost(self.name, block.name, block.module, block, _BLOCK_ADVICE)

    # ---- facts -------------------------------------------------------------------------------------------------------------

    @property
    def pool_bytes(self) -> int:
        """Device bytes of the slots that the blocks need: `padded_bytes` counts them, and those of others may be the same."""
        return self.slots * self.slot_bytes

    @property
    @override
    def fetched(self) -> bool:
        groups = self._groups
        placed = groups is not None and all(self in group.holders and group.placed for group in groups)
        return placed and (not self.slots or (self.ring in self.pool.users and self.pool.fits(self.slots, self.slot_bytes)))

    @property
    @override
    def host_bytes(self) -> int:
        return super().host_bytes + sum(block.host_bytes for block in self.blocks)

    @property
    @override
    def padded_bytes(self) -> int:
        return self.own_padded_bytes + self.pool_bytes

    @property
    @override
    def master_bytes(self) -> int:
        return super().master_bytes + sum(block.master_bytes for block in self.blocks)

    @property
    @override
    def device_bytes(self) -> int:
        return self.own_device_bytes + (self.pool.nbytes if self.ring in self.pool.users else 0)

    @property
    @override
    def pinned_bytes(self) -> int:
        return super().pinned_bytes + sum(block.pinned_bytes for block in self.blocks)

    @property
    @override
    def mapped_bytes(self) -> int:
        return super().mapped_bytes + sum(block.mapped_bytes for block in self.blocks)

    @override
    def unmapped(self) -> Iterator[tuple[str, str]]:
        return itertools.chain(super().unmapped(), *(block.unmapped() for block in self.blocks))

    @property
    @override
    def _checkpoint(self) -> Checkpoint | None:
        return self._partition.checkpoint

    @override
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return itertools.chain(super().tensors(), *(block.tensors() for block in self.blocks))

    # ---- change ------------------------------------------------------------------------------------------------------------

    @override
    def prepare(self, *, keep_origin: bool = False) -> None:
        if self._groups is None and self._outdated_entries():
            self._collect()
            self._measure()
            self._reselect()
        super().prepare(keep_origin=keep_origin)
        with unwatched():
            placements = self._context.place(itertools.chain.from_iterable(block.to_place for block in self.blocks), self.name)
        for block in self.blocks:
            block.prepare(keep_origin=keep_origin, placements=placements)

    @override
    def commit(self) -> None:
        super().commit()
        for block in self.blocks:
            block.commit()

    @override
    def validate(self, *, thorough: bool = False) -> bool:
        self._context.host.refuse_changed()
        changed = super().validate(thorough=thorough)  # of the tables of the blocks too
        strayed = [block.strayed() for block in self.blocks]  # of them all: one may refuse
        if any(strayed) and not changed and not self._in_use():
            with self._lock, unwatched():
                self._regroup()  # whose bytes are whose may have changed
        if changed or self._reselects:
            self._reselect()
            return True
        return False

    def _in_use(self) -> bool:
        return bool(self.ring.running) or any(self in group.bound for group in self._groups or ())

    @override
    def _regroup(self, *, pin_from: int | None = LATE_PIN_BYTES, placements: Placements | None = None) -> None:
        self._reselects = True  # until it is done, also where an interrupt comes between
        super()._regroup(pin_from=pin_from, placements=placements)

    @override
    def forget_copies(self) -> None:
        super().forget_copies()
        for block in self.blocks:
            block.forget_copies()

    @override
    def fetch(self, *, validated: bool = False) -> bool:
        opens = self.slots > 0 and self.ring not in self.pool.users
        copied = super().fetch(validated=validated)
        try:
            if self.slots:
                self.ring.open(self.slots, self.slot_bytes)
        except BaseException:
            self.drop()
            raise
        self.counters.loads += opens and not copied  # nothing but blocks
        return copied or opens

    @override
    def bind(self) -> None:
        super().bind()
        self.ring.begin()

    @override
    def unbind(self, *, force: bool = False, copy_back: bool = False) -> None:
        rest = functools.partial(super().unbind, force=force, copy_back=copy_back)
        steps: list[tuple[str, Callable[[], None]]] = [(f"unbind the rest of {self.name}", rest)]
        if force:
            steps.append((f"unbind the blocks of {self.name}", self.ring.settle))
        steps.append((f"end the pass of {self.name}", self.ring.end))
        raise_error(run_cleanup_steps(steps))

    @override
    def drop(self) -> None:
        self.ring.close()
        super().drop()

    @override
    def restore(self, *, copy_back: bool = False, to_origin: bool = False) -> None:
        whole = super().restore
        steps: list[tuple[str, Callable[[], None]]] = [
            (f"unbind the blocks of {self.name}", self.ring.settle),
            (f"let go of the slots of {self.name}", self.ring.close),
            (f"restore the rest of {self.name}", lambda: whole(copy_back=copy_back, to_origin=to_origin)),
        ]
        steps += [
            (f"restore {block.name}", functools.partial(block.restore, copy_back=copy_back, to_origin=to_origin)) for block in self.blocks
        ]
        raise_error(run_cleanup_steps(steps))


def stream(
    pipeline: object, planned: PlannedComponent, *, slots: int, context: ResidencyContext, checkpoint: Path | None = None
) -> StreamedResidency:
    """Return the residency of a component of a pipeline that streams; nothing is moved.

    Args:
        pipeline: The pipeline.
        planned: The component.
        slots: Device buffers for the blocks.
        context: What it shares with the pipeline's other components.
        checkpoint: The checkpoint that its weights are mapped from where it streams rank-locally; None: that which it was loaded from.

    Raises:
        ComponentPathError: The pipeline has changed since the plan was made, and a path leads nowhere.
        OffloadConfigError: The checkpoint is not there, or is none of safetensors.
    """
    component = module_at(pipeline, planned.path)
    staying = [module_at(pipeline, path) for path in planned.rest_paths]
    files: Sequence[Path] = ()
    if planned.transfer is DLOTransfer.RANK_LOCAL:
        files = loaded_from(component) if checkpoint is None else files_of(checkpoint, planned.path)
    mapped = Checkpoint(planned.path, component, files, required=checkpoint is not None) if files else None
    partition = Partition(component, streamed_blocks(pipeline, planned), staying, checkpoint=mapped)
    return StreamedResidency(partition, slots=slots, name=planned.path, context=context)
