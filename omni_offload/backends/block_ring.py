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
from omni_offload.backends.block_times import BlockTimes, TimedPass
from omni_offload.backends.failures import raise_error
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.errors import OffloadStateError
from omni_offload.residency import BlockResidency, Slot, SlotPool
from omni_offload.residency.counters import Counters

__all__ = ["BlockRing"]

logger = logging.getLogger(__name__)


class BlockRing:
    """The streamed blocks of one component.

    Attributes:
        timed: What the last pass took that was timed; None: none was, or it was taken.

    Args:
        name: The component, for messages.
        pool: The slots, which other rings take turns with; open while the component is on the device.
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
        self._extra: dict[int, Slot] = {}
        self._wants = 0, 0
        self._begun = False
        self._failed = False
        self._landing: torch.Event | None = None
        self._times: BlockTimes | None = None
        self._to_time = 0
        self._all: Sequence[int] = ()
        self.timed: TimedPass | None = None

    def arrange(self, blocks: Sequence[BlockResidency], *, limited: bool, expected: Sequence[int] = ()) -> None:
        """Say which blocks stream, and whether a budget forbids to take more memory than the slots.

        Args:
            blocks: In declared order.
            limited: As said.
            expected: The order in which all blocks are known to run; none: the declared one.
        """
        self.blocks = {block.index: block for block in blocks}
        self._order = BlockOrder(max(self.blocks, default=-1) + 1, [index for index in expected if index in self.blocks])
        self.limited = limited

    def time(self, passes: int, blocks: Sequence[int]) -> None:
        """Time the next passes, so many, for what they take where all of some blocks run; none on a device that cannot time events."""
        if self._times is None and passes:
            self._times = BlockTimes(self.pool.accelerator)
        self._to_time, self._all = passes if self._times is not None and self._times.possible else 0, blocks

    @property
    def _timing(self) -> BlockTimes | None:
        """What notes the moments of this pass; None, as a rule: none are noted."""
        return self._times if self._to_time else None

    # ---- passes ------------------------------------------------------------------------------------------------------------

    def open(self, slots: int, nbytes: int) -> None:
        """Have slots for the blocks, and fetch the first ones as far as slots are free.

        Raises:
            torch.OutOfMemoryError: As raised; the ring holds no slot then.
        """
        with self.pool.lock:
            self._wants = slots, nbytes
            try:
                self.pool.open(self, slots, nbytes)
            except BaseException:
                self.close()
                raise
            self._prefetch(takes=False)

    def begin(self) -> None:
        """Start a pass of the component, unless one runs: the ring is the hot one now, and takes the slots of others."""
        with self.pool.lock:
            if self._begun:
                return
            self._failed = False
            self._order.begin()
            for slot in self.pool:
                if slot.tenant is not None and self._has(slot.tenant):
                    slot.tenant.check()
            self._begun = True
            if (times := self._timing) is not None:
                times.begin()
            self._prefetch()

    def end(self) -> None:
        """End a pass. Blocks until the copies that it ran on have landed: masters may be edited from here on.

        A pass that is timed is waited for to its end.
        """
        begun, self._begun = self._begun, False
        self._order.end(learn=not self._failed)
        if begun and (times := self._timing) is not None:
            if self._failed:
                times.forget()
            else:
                self._to_time -= 1
                times.end()
                self.timed = times.read(self._all)
        landing = self._landing
        if landing is not None and not landing.query():
            self.pool.accelerator.block_on(landing)  # copies land in order: those before it have, too
        self._landing = None  # last: a wait that was interrupted is waited again

    def settle(self) -> None:
        """Bind every block to its masters, whatever an interrupt left. Idempotent; the first failure is raised after every step ran."""
        self._depths.clear()
        error = run_cleanup_steps((f"unbind {block.name}", functools.partial(block.unbind, force=True)) for block in self.blocks.values())
        self._failed = True
        raise_error(error)

    def close(self) -> None:
        """Let go of the slots. Blocks that run keep their memory until they are done. Idempotent."""
        with self.pool.lock:
            for block in self.blocks.values():
                block.forget_slots()
            for slot in self._extra.values():
                slot.free()
            self._extra.clear()
            self.pool.close(self)

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
        times = self._timing
        with self.pool.lock:
            if times is not None:
                times.mark(None)
            self._order.use(index)
            block.take_in()
            if block.current:
                self._counters.prefetch_hits += block.ahead
            else:
                self._counters.misses += 1
                self._fetch(block, block.slot or self._slot_for(block))
            block.ahead = False
            block.bind()
            if times is not None:
                times.mark(index)
            if (recorder := self.pool.accelerator.recorder) is not None:
                recorder.begins(block.name)
            self._prefetch()

    def pass_by(self, index: int) -> None:
        """Note that a resident block runs, which needs nothing."""
        if (times := self._timing) is not None:
            times.mark(index)

    def leave(self, index: int, *, failed: bool = False) -> None:
        """End one use of a block; with the last its weights are its masters again, and its slot is free for the next."""
        self._failed = self._failed or failed
        depth = self._depths.get(index, 0)
        if depth > 1:
            self._depths[index] = depth - 1
            return
        self._depths.pop(index, None)
        block = self.blocks[index]
        with self.pool.lock:
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

    def _has(self, block: BlockResidency) -> bool:
        return self.blocks.get(block.index) is block

    def _slot_for(self, block: BlockResidency) -> Slot:
        """Return a slot for a block that runs now: a free one, else another ring's, else that of the block needed last."""
        slot = self._free_slot(block, set())
        if slot is None and not self.pool.fits(*self._wants):
            self.pool.open(self, *self._wants)  # one that moves with it needs more slots of less, and they were made for that one last
            slot = self._free_slot(block, set())
        if slot is not None:
            return slot
        others = (slot.tenant for slot in self.pool if slot.tenant is not None and not self._has(slot.tenant))
        running = ", ".join([*(self.blocks[one].name for one in self._depths if one != block.index), *(other.name for other in others)])
        if self.limited:
            raise OffloadStateError(
                f"{block.name} was called within {running}, and all {len(self.pool)} slots are in use; raise 'slots' so "
                "that one is left for each block that runs within others"
            )
        extra = self._extra[block.index] = self.pool.make_extra(block.padded_bytes)
        logger.debug("%s: a slot more, for a block within %s", self.name, running)
        return extra

    def _free_slot(self, block: BlockResidency, wanted: set[int], *, takes: bool = True) -> Slot | None:
        """Return a slot that no running and no wanted block is in: an empty one, else another ring's, else that of the block needed last.

        Args:
            block: What it is for.
            wanted: The blocks that are to stay where they are.
            takes: Whether to take any but an empty one.
        """
        idle: dict[int, Slot] = {}
        other: Slot | None = None
        for slot in self.pool:
            tenant = slot.tenant
            if slot.nbytes < block.padded_bytes:
                continue  # made for another ring, whose block runs in it
            if tenant is None:
                return slot
            if not self._has(tenant):
                other = other if tenant.bound else slot
            elif tenant.index not in self._depths and tenant.index not in wanted:
                idle[tenant.index] = slot
        if len(idle) > 1 and other is None:
            for index in self._order.upcoming():
                idle.pop(index, None)
                if len(idle) == 1:
                    break
        found = other or next(iter(idle.values()), None)
        if not takes or found is None or found.tenant is None:
            return None
        found.tenant.evict()
        return found

    def _prefetch(self, *, takes: bool = True) -> None:
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
            slot = self._free_slot(block, wanted, takes=takes)
            if slot is None:
                return
            self._fetch(block, slot)
            block.ahead = True

    def _fetch(self, block: BlockResidency, slot: Slot) -> None:
        times = self._timing
        if times is None or not block.padded_bytes:
            block.fetch_into(slot)
            return
        slot.order_after_uses()  # first: what is waited for is not the copy's time
        began = times.copy_begins()
        block.fetch_into(slot)
        times.copy_ends(began, block.padded_bytes)
