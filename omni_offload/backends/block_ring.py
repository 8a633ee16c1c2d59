"""Blocks take turns in a few device buffers: each is fetched while those before it run.

Events order everything; the host does not block (pinned masters). A copy into a slot waits for the last use of what lies there; a
block's kernels wait for its copy. What order blocks run in is a guess that costs time where it is wrong: a block that is not there
when it is entered is fetched then.
"""

import functools
import logging
from collections.abc import Collection, Sequence

import torch

from omni_offload.backends.block_order import BlockOrder
from omni_offload.backends.failures import raise_error
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.errors import OffloadStateError
from omni_offload.residency import BlockResidency, Slot, SlotPool
from omni_offload.residency.managed import Counters

__all__ = ["BlockRing"]

logger = logging.getLogger(__name__)


class BlockRing:
    """The streamed blocks of one component.

    Args:
        name: The component, for messages.
        pool: The slots; open while the component is on the device.
        counters: Where hits, misses and wasted copies are counted.
    """

    def __init__(self, name: str, pool: SlotPool, counters: Counters) -> None:
        self.name = name
        self.pool = pool
        self.blocks: dict[int, BlockResidency] = {}
        self.limited = False
        self._counters = counters
        self._order = BlockOrder(0)
        self._depths: dict[int, int] = {}
        self._ahead: set[int] = set()
        self._extra: dict[int, Slot] = {}
        self._failed = False
        self._landing: torch.Event | None = None

    def arrange(self, blocks: Sequence[BlockResidency], *, limited: bool) -> None:
        """Say which blocks stream, in declared order, and whether a budget forbids to take more memory than the slots."""
        self.blocks = {block.index: block for block in blocks}
        self._order = BlockOrder(max(self.blocks, default=-1) + 1)
        self.limited = limited

    # ---- passes ------------------------------------------------------------------------------------------------------------

    def begin(self, slots: int, nbytes: int) -> None:
        """Start a pass of the component: make the slots, and fetch the first blocks.

        Raises:
            torch.OutOfMemoryError: As raised; no slot is held then.
        """
        self._failed = False
        self._order.begin()
        if not self.pool.fits(slots, nbytes):
            self.close()
            try:
                self.pool.open(slots, nbytes)
            except BaseException:
                self.close()
                raise
        for slot in self.pool:
            if slot.tenant is not None:
                slot.tenant.check()
        self._prefetch()

    def end(self) -> None:
        """End a pass. Blocks until the copies that it ran on have landed: masters may be edited from here on."""
        self._order.end(learn=not self._failed)
        landing, self._landing = self._landing, None
        if landing is not None and not landing.query():
            self.pool.accelerator.block_on(landing)  # copies land in order: those before it have, too

    def settle(self) -> None:
        """Bind every block to its masters, whatever an interrupt left. Idempotent; the first failure is raised after every step ran."""
        self._depths.clear()
        error = run_cleanup_steps((f"unbind {block.name}", functools.partial(block.unbind, force=True)) for block in self.blocks.values())
        self._failed = True
        raise_error(error)

    def close(self) -> None:
        """Let go of the slots. Blocks that run keep their memory until they are done. Idempotent."""
        for index, block in self.blocks.items():
            if index in self._ahead:
                self._counters.wasted_copies += 1
            block.forget_slots()
        self._ahead.clear()
        for slot in self._extra.values():
            slot.free()
        self._extra.clear()
        self.pool.close()

    # ---- use ---------------------------------------------------------------------------------------------------------------

    def enter(self, index: int) -> None:
        """Bind a block's weights to their device copy, for one use more; the current stream waits for the copy.

        Raises:
            OffloadStateError: More blocks run within one another than there are slots, and a budget forbids another.
            torch.OutOfMemoryError: As raised.
        """
        depth = self._depths.get(index, 0)
        self._depths[index] = depth + 1
        if depth:
            return
        block = self.blocks[index]
        self._order.use(index)
        if block.current:
            self._counters.prefetch_hits += index in self._ahead
        else:
            self._counters.misses += 1
            block.fetch_into(block.slot or self._slot_for(index))
        self._ahead.discard(index)
        block.bind()
        if (recorder := self.pool.accelerator.recorder) is not None:
            recorder.begins(block.name)
        self._prefetch()

    def leave(self, index: int, *, failed: bool = False) -> None:
        """End one use of a block; with the last its weights are its masters again, and its slot is free for the next."""
        self._failed = self._failed or failed
        depth = self._depths.get(index, 0)
        if depth > 1:
            self._depths[index] = depth - 1
            return
        self._depths.pop(index, None)
        block = self.blocks[index]
        if block.slot is not None:
            self._landing = block.slot.ready
        if (recorder := self.pool.accelerator.recorder) is not None:
            recorder.ends(block.name)
        block.unbind()
        if index in self._extra:
            block.forget_slots()
            self._extra.pop(index).free()
        self._prefetch()

    @property
    def running(self) -> Collection[int]:
        """The blocks that run now."""
        return self._depths.keys()

    def _slot_for(self, index: int) -> Slot:
        """Return a slot for a block that runs now: a free one, else that of the block needed last."""
        slot = self._free_slot(set())
        if slot is not None:
            return slot
        running = ", ".join(self.blocks[one].name for one in self._depths if one != index)
        if self.limited:
            raise OffloadStateError(
                f"{self.blocks[index].name} was called within {running}, and all {len(self.pool)} slots are in use; raise 'slots' so "
                "that one is left for each block that runs within others"
            )
        extra = self._extra[index] = self.pool.make_extra(self.blocks[index].padded_bytes)
        logger.debug("%s: a slot more, for a block within %s", self.name, running)
        return extra

    def _free_slot(self, wanted: set[int]) -> Slot | None:
        """Return a slot that no running and no wanted block is in: an empty one, else that of the block needed last."""
        idle: dict[int, Slot] = {}
        for slot in self.pool:
            if slot.tenant is None:
                return slot
            if slot.tenant.index not in self._depths and slot.tenant.index not in wanted:
                idle[slot.tenant.index] = slot
        if len(idle) > 1:
            for index in self._order.upcoming():
                idle.pop(index, None)
                if len(idle) == 1:
                    break
        found = next(iter(idle.values()), None)
        if found is not None and found.tenant is not None:
            self._counters.wasted_copies += found.tenant.index in self._ahead
            self._ahead.discard(found.tenant.index)
            found.tenant.leave()
        return found

    def _prefetch(self) -> None:
        """Fetch the blocks that are expected next, as far as there are slots; running out of memory cannot happen here."""
        wanted: set[int] = set()
        for index in self._order.upcoming():
            block = self.blocks.get(index)
            if block is None or index in wanted:
                continue
            if len(wanted) == len(self.pool):
                return
            wanted.add(index)
            if block.slot is not None or index in self._depths:
                continue
            slot = self._free_slot(wanted)
            if slot is None:
                return
            block.fetch_into(slot)
            self._ahead.add(index)
