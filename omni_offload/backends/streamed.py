"""A component whose blocks stream: the rest of it is loaded like any component, and the ring serves the blocks."""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from typing_extensions import override

from omni_offload.backends.block_ring import BlockRing
from omni_offload.backends.failures import raise_error
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.errors import OffloadConfigError
from omni_offload.residency import BlockResidency, ModuleResidency, Partition, ResidencyContext, SlotPool
from omni_offload.residency.managed import unwatched
from omni_offload.residency.tensors import Entry
from omni_offload.schedule import BlockCost, choose_residents, least_bytes

__all__ = ["StreamedResidency"]


class StreamedResidency(ModuleResidency):
    """The rest of a component, and its blocks. Loading brings the rest, and makes the slots; a block is bound while it runs.

    Args:
        module: The component.
        blocks: Its blocks by name, in execution order.
        staying: Modules inside blocks that stay with the rest.
        slots: Device buffers for the blocks.
        name: How messages call it.
        context: What it shares with the pipeline's other components.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        blocks: Sequence[tuple[str, torch.nn.Module]],
        *,
        staying: Sequence[torch.nn.Module] = (),
        slots: int,
        name: str,
        context: ResidencyContext,
    ) -> None:
        self._partition = Partition(module, [block for _, block in blocks], staying)
        super().__init__(module, context.accelerator.device, name=name, context=context)
        self.modules = [block for _, block in blocks]
        self.blocks = [
            BlockResidency(block, index, self._partition, name=path, context=context, counters=self.counters)
            for index, (path, block) in enumerate(blocks)
        ]
        self.ring = BlockRing(name, SlotPool(context.accelerator, context.meter), self.counters)
        self._slots = slots

    @override
    def _select(self, entries: list[Entry]) -> list[Entry]:
        with unwatched():
            self._partition.update(entries)
        return self._partition.of_rest(entries)

    def arrange(self, *, number: int | None, limit: int | None, leading: bool = False) -> None:
        """Choose the resident blocks; they join the rest. Comes before `prepare`, once; nothing is moved.

        Args:
            number: How many; None: as many as `limit` allows, none without one.
            limit: Device bytes of the whole component; None: no limit.
            leading: Take the first blocks.

        Raises:
            OffloadConfigError: The limit does not hold the rest and the slots.
        """
        sizes = [block.padded_bytes for block in self.blocks]
        room = None if limit is None else limit - super().padded_bytes
        costs = BlockCost.balanced(sizes, max(sum(sizes) - (room or 0), 0))
        if room is not None and room < least_bytes(costs, self._slots) and number is None:
            number = 0  # what does not fit is said where all budgets are checked
        try:
            found = choose_residents(costs, self._slots, number=number, nbytes=None if number == 0 else room, leading=leading)
        except ValueError as error:
            raise OffloadConfigError(f"component {self.name!r} cannot stream with {number} resident blocks: {error}") from error
        self._partition.keep(found.residents)
        self._collect()
        self._measure()
        self._reselect()
        self.ring.arrange([self.blocks[index] for index in range(len(sizes)) if index not in found.residents], limited=limit is not None)

    def _reselect(self) -> None:
        for block in self.blocks:
            block.reselect()

    # ---- facts -------------------------------------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest streamed block's."""
        return max((block.padded_bytes for block in self.ring.blocks.values()), default=0)

    @property
    def slots(self) -> int:
        """Slots that the blocks take turns in."""
        return min(self._slots, sum(1 for block in self.ring.blocks.values() if block.padded_bytes))

    @property
    @override
    def host_bytes(self) -> int:
        return super().host_bytes + sum(block.host_bytes for block in self.blocks)

    @property
    @override
    def padded_bytes(self) -> int:
        return super().padded_bytes + self.slots * self.slot_bytes

    @property
    @override
    def device_bytes(self) -> int:
        return super().device_bytes + self.ring.pool.nbytes

    @property
    @override
    def pinned_bytes(self) -> int:
        return super().pinned_bytes + sum(block.pinned_bytes for block in self.blocks)

    @override
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors()
        for block in self.blocks:
            yield from block.tensors()

    # ---- change ------------------------------------------------------------------------------------------------------------

    @override
    def prepare(self, *, keep_origin: bool = False) -> None:
        if self._groups is None:
            self._collect()
            self._measure()
            self._reselect()
        super().prepare(keep_origin=keep_origin)
        for block in self.blocks:
            block.prepare(keep_origin=keep_origin)

    @override
    def commit(self) -> None:
        super().commit()
        for block in self.blocks:
            block.commit()

    @override
    def validate(self, *, thorough: bool = False) -> bool:
        changed = super().validate(thorough=thorough)
        if changed:
            self._reselect()
        else:
            changed = any([block.validate(thorough=thorough) for block in self.blocks])
        return changed

    @override
    def forget_copies(self) -> None:
        super().forget_copies()
        for block in self.blocks:
            block.forget_copies()

    @override
    def fetch(self) -> bool:
        copied = super().fetch()
        try:
            self.ring.begin(self.slots, self.slot_bytes)
        except BaseException:
            self.drop()
            raise
        return copied

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
        for block in self.blocks:
            steps.append((f"restore {block.name}", functools.partial(block.restore, copy_back=copy_back, to_origin=to_origin)))
        raise_error(run_cleanup_steps(steps))
