"""The residency of a block of which every rank of a group keeps a part: it is gathered into a slot, where it is bound while it runs."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from typing_extensions import override

from omni_offload.cleanup import run_cleanup_steps
from omni_offload.errors import OffloadStateError
from omni_offload.residency.block import BlockResidency
from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.counters import Counters
from omni_offload.residency.lost import note_lost
from omni_offload.residency.managed import unwatched
from omni_offload.residency.partition import Partition
from omni_offload.residency.shards import Gatherer, Landing, Shard, padded_to_ranks, refuse_unfit
from omni_offload.residency.slots import Slot, SlotViews
from omni_offload.residency.tensors import Entry, Placements, Shapes, group_by_bytes, type_of

__all__ = ["ShardedBlock"]


class ShardedBlock(BlockResidency):
    """The tensors that travel with one block, of which the host keeps this rank's part. While the block does not run they are empty.

    Args:
        partition: The component's blocks, and which tensors travel with which.
        index: The block's place in execution order.
        context: What it shares with the other blocks and the rest of the component.
        counters: Where its copies are counted: the component's.
        gatherer: The ranks.
    """

    def __init__(self, partition: Partition, index: int, context: ResidencyContext, counters: Counters, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._shard: Shard | None = None
        self._origin: list[torch.Tensor] | None = None
        self._counted: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._home: Shapes | None = None
        self._landings: list[Landing] = []
        self._filled = False
        self._views: tuple[Slot, SlotViews] | None = None
        self._marked = False
        super().__init__(partition, index, context, counters)

    # ---- facts -------------------------------------------------------------------------------------------------------------

    @property
    def shard(self) -> Shard | None:
        """This rank's part; None while the tensors are whole."""
        return self._shard

    @property
    @override
    def padded_bytes(self) -> int:
        return padded_to_ranks(self._padded, self._gatherer.size)

    @property
    @override
    def master_bytes(self) -> int:
        return self.padded_bytes // self._gatherer.size

    @property
    @override
    def pinned_bytes(self) -> int:
        return self._shard.nbytes if self._shard is not None and self._shard.pinned else 0

    @property
    @override
    def bound(self) -> bool:
        return self._views is not None

    @property
    @override
    def current(self) -> bool:
        return self.slot is not None and self._filled

    # ---- preparation -------------------------------------------------------------------------------------------------------

    @override
    def prepare(self, *, keep_origin: bool = False, placements: Placements | None = None) -> None:
        with self._lock, unwatched():
            if self._shard is not None:
                return
            found = sorted(group_by_bytes(self._entries), key=lambda placement: type_of(placement.entries))
            refuse_unfit(self.name, found)
            self._context.own(self._entries, self.name)
            self._begun = True
            self._marked = any(entry.tensor.is_conj() or entry.tensor.is_neg() for entry in self._entries)
            shard = Shard(found, self._gatherer, self._context.host.hold)
            self.counters.bytes_out += sum(placement.nbytes for placement in found if placement.device.type != "cpu")
            self._counted = [tensor for entry in self._entries for tensor in entry.counters]
            self._origin = [tensor.data for tensor in shard.tensors]
            self._shard = shard  # what undoes the rest is there
            self._partition.send_away(self.index, shard.tensors)
            self._bind_to(shard.empty)
            self._home = Shapes(shard.empty)
            self._versions = self._count()
            self._follow()

    @override
    def commit(self) -> None:
        super().commit()
        self._origin = None

    @property
    @override
    def to_place(self) -> Sequence[Entry]:
        return ()  # the memory of a whole block goes before the next is prepared

    @override
    def reselect(self, placements: Placements | None = None) -> None:
        if self._shard is None:
            super().reselect(placements)

    def _bind_to(self, values: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(mode=False) if self._marked else contextlib.nullcontext():
            for tensor, value in zip(self._held.tensors, values, strict=True):
                tensor.data = value

    @property
    def _held(self) -> Shard:
        if self._shard is None:
            raise RuntimeError(f"{self.name} is whole: there is no part of it")
        return self._shard

    def _count(self) -> list[int]:
        return [tensor._version for tensor in self._counted]  # noqa: SLF001  (the counter has no public name)

    # ---- change ------------------------------------------------------------------------------------------------------------

    @override
    def strayed(self) -> bool:
        self._refuse_edits()
        return False

    @override
    def take_in(self) -> None:
        self._refuse_edits()

    @override
    def check(self) -> None:
        """Nothing to look at: edits of values that are elsewhere are refused."""

    def _refuse_edits(self) -> None:
        if self._home is None or (self._home.fit(self._held.tensors) and self._versions == self._count()):
            return
        raise OffloadStateError(
            f"weights of {self.name} were written, cast or given other memory while this rank holds a part of them only, where that "
            "has no effect; call disable_omni_offload(), change them on every rank alike, and enable it again"
        )

    @override
    def forget_copies(self) -> None:
        self._filled = False

    # ---- device ------------------------------------------------------------------------------------------------------------

    @override
    def fetch_into(self, slot: Slot) -> None:
        """Queue the copy of this rank's part into a slot, after all that ran on what was in it, and the gathers of all parts.

        The host blocks where the masters are pageable, or a backend gathers on the host.
        """
        with self._lock, unwatched():
            shard = self._held
            if self.slot is not slot:
                self.leave()
                self.slot, slot.tenant = slot, self
            self._land()
            self._filled = False
            self._gatherer.gather_block(self.name, functools.partial(self._gather_into, slot, shard))
            self._filled = True

    def _gather_into(self, slot: Slot, shard: Shard) -> None:
        if (recorder := self._accelerator.recorder) is not None:
            recorder.copies_for(self.name)
        slot.order_after_uses()
        for piece, own, whole in shard.chunks(slot.targets_of(shard.layout)):
            self._context.host.copy(own, piece, pinned=shard.pinned)
            self.counters.bytes_in += piece.numel()
            self._landings.append(self._gatherer.gather(whole, own))

    def _land(self) -> None:
        """Let what follows in the slot wait for the gathers that were queued."""
        if self._landings and self.slot is not None:
            slot = self.slot
            slot.ready = landed = self._gatherer.landed(self._landings)
            slot.uses[self._accelerator.landing_stream.stream_id] = landed
            self._landings = []  # last: where it is cut short, whoever takes the slot waits still

    @override
    def bind(self) -> None:
        with self._lock, unwatched():
            self._land()
            slot, shard = cast("Slot", self.slot), self._held  # `fetch_into` comes first
            self._await([slot.ready])
            self._versions = self._count()
            views = slot.views_of(shard.layout, shard.likes)
            self._views = slot, views
            self._bind_to(views.tensors)
            self._follow()

    @override
    def unbind(self, *, force: bool = False, copy_back: bool = False) -> None:
        with self._lock, unwatched():
            shard, views = self._shard, self._views
            if shard is None or (views is None and not force) or self._home is None:
                return
            written = False
            if views is not None:
                views[0].uses.update(self._uses())
                written = not force and self._written(views[1])
            self._bind_to(shard.empty)
            self._views = None
            self._versions = self._count()
            self._follow()
            if written:
                self._filled = False
                raise OffloadStateError(
                    f"{self.name} wrote its weights or buffers while it ran, and this rank holds a part of them only; name the module "
                    "that does so in rest_submodules of the pipeline's _offload_plan, or use weight_transfer 'rank-local'"
                )

    def _written(self, views: SlotViews) -> bool:
        if self._versions != self._count() or views.addresses != [tensor.data_ptr() for tensor in self._held.tensors]:
            return True
        return any(entry.always_written() for entry in self._entries if entry.buffer_of is not None)

    @override
    def drop(self) -> None:
        self._filled = False

    @override
    def leave(self) -> None:
        with self._lock, unwatched():
            with contextlib.suppress(OffloadStateError):  # it is noted; whoever gathers next is told
                self._land()
            self._landings = []
            super().leave()

    # ---- the end -----------------------------------------------------------------------------------------------------------

    @override
    def restore(self, *, copy_back: bool = False, to_origin: bool = False) -> None:
        with self._lock, unwatched():
            steps: list[tuple[str, Callable[[], None]]] = [
                (f"unbind {self.name}", functools.partial(self.unbind, force=True)),
                (f"put {self.name} back", self._put_back),
            ]
            error = run_cleanup_steps(steps)
            if error is None:
                self._give_up()
        if error is not None:
            try:
                raise error
            finally:
                error = None  # no cycle with its traceback

    def _put_back(self) -> None:
        """Make the tensors whole: as they were where that is known still, else all ranks gather them."""
        shard = self._shard
        if shard is None:
            return
        if self._origin is not None:
            self._bind_to(self._origin)
        elif self._gatherer.lose(self.name):
            note_lost(shard.tensors)
        else:
            self._origin = self._gatherer.make_whole(self.name, shard.make_whole)  # first: a binding that is cut short is done again
            self._bind_to(self._origin)
        self._follow()

    def _give_up(self) -> None:
        shard, self._shard = self._shard, None
        self._partition.take_back(self.index)
        self._origin, self._home = None, None
        if shard is not None and shard.region is not None:
            self._context.host.let_go(shard.region)
        self._context.release(self._entries)
        self._begun = False
