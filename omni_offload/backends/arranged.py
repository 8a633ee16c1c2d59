"""A component of whose blocks some stay on the device, with its rest, and the others stream: which, and how they change places."""

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from typing_extensions import override

from omni_offload.backends.block_ring import BlockRing
from omni_offload.backends.residents import ResidentChoice
from omni_offload.errors import OffloadConfigError
from omni_offload.residency import BlockResidency, ModuleResidency, Partition, SlotPool
from omni_offload.residency.group import Group
from omni_offload.residency.managed import unwatched
from omni_offload.residency.tables import collect, leaves_in
from omni_offload.residency.tensors import Entry

__all__ = ["ArrangedResidency"]


class ArrangedResidency(ModuleResidency):
    """Chooses the resident blocks of a component, within what it may take: before it runs, and once it is known what its blocks take.

    Attributes:
        timed_passes: How many passes of a call are timed at most; 0: none.
        blocks: All of its blocks.
        ring: Those that stream.
    """

    timed_passes: ClassVar[int] = 3
    blocks: Sequence[BlockResidency] = ()
    ring: BlockRing
    _partition: Partition
    _slots: int
    _choice: ResidentChoice
    _filled: tuple[int, ...] | None = None
    _reselects = False
    _unsettled = False
    _times = False
    _declined = False

    def arrange(self, *, number: int | None, limit: int | None, beside: int = 0, leading: bool = False, if_better: bool = False) -> None:
        """Choose the resident blocks; they join the rest. No block runs; nothing is moved but copies on the device are let go.

        Args:
            number: How many; None: as many as `limit` allows, none without one.
            limit: Device bytes of the whole component; None: no limit.
            beside: Bytes that its slots take at the least, as others need them.
            leading: Take the first blocks.
            if_better: Only if others are worth their copies; everything else stays where it is then.

        Raises:
            OffloadConfigError: The limit does not hold the rest and the slots.
        """
        if self._unsettled and self._groups is not None:
            self._keep(self._partition.residents)  # first, so that what is counted is where it is said to be
        sizes, present = self._partition.sizes, self._partition.residents
        room = None if limit is None else limit - self._bytes_in_use[0]
        try:
            if if_better:
                found = self._choice.choose_better(sizes, present, number=number, nbytes=room, beside=beside, held=self.fetched)
            else:
                found = self._choice.choose(sizes, number=number, nbytes=room, beside=beside, leading=leading)
        except ValueError as error:
            raise OffloadConfigError(f"component {self.name!r} cannot stream with {number} resident blocks: {error}") from error
        self._declined = found is None and self.fetched  # once nothing is there to be copied again it may be worth it
        if found is None:
            return
        self._filled = self._bytes_in_use if limit is not None and number is None else None
        if self._groups is None or present != found or self._unsettled:
            self._unsettled = True  # until it is done, also where an interrupt comes between
            self._exchange(found) if if_better else self._keep(found)
        slots = self.slots, self.slot_bytes
        streamed = [block for block in self.blocks if block.index not in found]
        self.ring.arrange(streamed, limited=limit is not None, expected=self._choice.sequence)
        if slots != (self.slots, self.slot_bytes):
            self.ring.close()
        self._unsettled = False
        self._times = self.pins and not leading and 0 < len(found) < len(self.blocks)
        self.time_passes()

    def time_passes(self) -> None:
        """Time the next passes, where that may tell of better residents."""
        self.ring.time(self.timed_passes if self._times else 0, range(len(self.blocks)))

    def learn(self) -> bool:
        """Take in what the last pass took, if it was timed; returns whether other residents may be better now."""
        timed, self.ring.timed = self.ring.timed, None
        if timed is not None and self._choice.learn(timed):
            return True
        if timed is not None:
            self.ring.time(0, ())  # it takes what is known
        return self._declined and not self.fetched

    @property
    def costs(self) -> str:
        """What the residents were chosen by: `measured` times of the blocks, or `assumed` ones."""
        return "assumed" if self._choice.timed is None else "measured"

    @property
    def resized(self) -> bool:
        """Whether the residents were chosen to fill a budget, and a block's size or the rest's has changed; or a choice was cut short."""
        return self._unsettled or (self._filled is not None and self._filled != self._bytes_in_use)

    @property
    def _bytes_in_use(self) -> tuple[int, ...]:
        """Device bytes of the rest without residents, and of every block."""
        sizes = self._partition.sizes
        return super().padded_bytes - sum(sizes[index] for index in self._partition.residents), *sizes

    def _keep(self, residents: Collection[int]) -> None:
        self.drop()
        self._partition.keep(residents)
        if self._groups is None:
            self._collect()
            self._measure()
        else:
            with self._lock, unwatched():
                entries = collect(self._modules)[0]
                self._find_homes(entries)
                placements = self._context.place(entries, self.name)
                for block in self.blocks:
                    if block.index not in residents:  # first: what nobody has for a moment would lose its master
                        block.reselect(placements)
                self._regroup()
        self._reselect()

    def _find_homes(self, entries: Sequence[Entry]) -> None:
        """Find what travels with which block; what other components have, too, is the rest's."""
        self._partition.update(entries, self._context.entries_beside({self, *self.blocks}))

    def _exchange(self, residents: Collection[int]) -> None:
        """Let some residents leave and others come; all other weights stay where they are. Who comes is fetched with the rest."""
        present = self._partition.residents
        leaving = [block for block in self.blocks if block.index in present.difference(residents)]
        coming = [block for block in self.blocks if block.index in set(residents) - present]
        with self.pool.lock, self._lock, unwatched():
            for block in coming:
                block.forget_slots()
            self._partition.keep(residents)
            self._find_homes(collect(self._modules)[0])
            for block in leaving:  # first, as above
                block.reselect()
            self._regroup()
            for block in coming:
                block.reselect()
            self._reselects = False

    @override
    def _batches(self, groups: Sequence[Group]) -> Iterable[Sequence[Group]]:
        """Return groups by resident block: where one leaves, its memory is free."""
        if not self._times:
            return super()._batches(groups)
        parts = ((index, part) for index in self._partition.residents for part in self.blocks[index].module.modules())
        whose = {id(tensor): index for index, part in parts for tensor in leaves_in(part)}
        batches: dict[int, list[Group]] = {}
        for group in groups:
            batches.setdefault(whose.get(id(group.tensors[0]), -1), []).append(group)
        return batches.values()

    def _reselect(self) -> None:
        with unwatched():  # where all tensors of the component are, once for all blocks
            placements = None if self._groups is None else self._context.place(collect(self._modules)[0], self.name)
        for block in self.blocks:
            block.reselect(placements)
        self._reselects = False

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
    def pool(self) -> SlotPool:
        """The slots, which the owner's other rings take turns with."""
        return self.ring.pool
