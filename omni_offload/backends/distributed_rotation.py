"""The components of a pipeline of which some have blocks that are gathered: what all ranks have to do alike."""

from collections.abc import Iterator

import torch
from typing_extensions import override

from omni_offload.accelerator import Accelerator
from omni_offload.backends.gathering import Gathering
from omni_offload.backends.owners import Member
from omni_offload.backends.rotation import Rotation
from omni_offload.backends.sharded import ShardedResidency, shard
from omni_offload.backends.streamed import StreamedResidency
from omni_offload.config import DLOTransfer
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan
from omni_offload.refusals import SHARED_MEMORY, SKIPPING_CACHE
from omni_offload.residency.managed import unwatched
from omni_offload.residency.tensors import Entry, group_by_bytes

__all__ = ["DistributedRotation"]

#: Hooks of diffusers that skip blocks by what is computed: other blocks on other ranks.
_SKIPPING = ("fbc_", "sea_cache")


class DistributedRotation(Rotation):
    """The components of one pipeline on one rank of a group.

    Args:
        pipeline: The pipeline; only a weak reference is kept.
        plan: What is done with each component.
        accelerator: The device.
        gathering: The ranks that gather with one another.
    """

    def __init__(self, pipeline: object, plan: ResolvedOffloadPlan, accelerator: Accelerator, gathering: Gathering) -> None:
        self._gathering = gathering
        self._sealed = False
        super().__init__(pipeline, plan, accelerator)
        self.room.fetches_ahead = False  # how far copies are differs between ranks

    @property
    def gathered(self) -> list[tuple[Member, ShardedResidency]]:
        """The components whose blocks are gathered."""
        residencies = ((member, member.owner.residency) for member in self.members.values())
        return [(member, residency) for member, residency in residencies if isinstance(residency, ShardedResidency)]

    @override
    def _make_streamed(self, planned: PlannedComponent) -> StreamedResidency:
        if planned.transfer is not DLOTransfer.ALLGATHER:
            return super()._make_streamed(planned)
        return shard(self._pipeline(), planned, slots=self.plan.config.slots, context=self.context, gatherer=self._gathering)

    @override
    def take(self, planned: PlannedComponent, module: torch.nn.Module) -> Member:
        gathers = planned.transfer is DLOTransfer.ALLGATHER
        if gathers and self._sealed:
            raise OffloadStateError(
                f"component {planned.path!r} was put there while offload is enabled, and its blocks are to be gathered; call "
                "disable_omni_offload() on all ranks and enable it again"
            )
        member = super().take(planned, module)
        if gathers and not isinstance(member.owner.residency, ShardedResidency):
            raise OffloadStateError(
                f"component {planned.path!r} streams for another pipeline, and for this one its blocks are to be gathered; disable the "
                "other pipeline first"
            )
        return member

    @override
    def claim(self) -> None:
        super().claim()
        problems = [*self._overlaps(), *self._caches()]
        if problems:
            raise OffloadConfigError(f"blocks cannot be gathered: {'; '.join(problems)}")

    def _overlaps(self) -> Iterator[str]:
        """Yield what is wrong with weights that lie in a gathered block and in another component."""
        of: dict[int, tuple[str, bool]] = {}
        entries: list[Entry] = []
        for member in self.members.values():
            residency = member.owner.residency
            blocks = residency.blocks if isinstance(residency, ShardedResidency) else ()
            inside = {id(tensor) for block in blocks for _, tensor in block.tensors()}
            for name, tensor in residency.tensors():
                entries.append(Entry.of(tensor, name, buffer_of=None))
                of[id(entries[-1])] = member.name, id(tensor) in inside
        with unwatched():
            for placement in group_by_bytes(entries):
                homes = {of[id(entry)] for entry in placement.entries}
                if len({component for component, _ in homes}) > 1 and any(gathered for _, gathered in homes):
                    names = ", ".join(entry.name for entry in placement.entries)
                    yield SHARED_MEMORY.of(f"{names} share memory, and one of them lies in a block that is gathered")

    def _caches(self) -> Iterator[str]:
        for member, residency in self.gathered:
            hooks = {
                name
                for module in residency.modules[0].modules()
                for name in getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
                if name.startswith(_SKIPPING)
            }
            if hooks:
                skips = f"has a cache that skips blocks by what is computed ({', '.join(sorted(hooks))})"
                yield SKIPPING_CACHE.of(f"component {member.name!r} {skips}, which may be others on other ranks")

    @override
    def commit(self) -> None:
        super().commit()
        self._sealed = True

    def describe(self) -> list[str]:
        """Return what has to be equal on all ranks before anything is gathered."""
        return [line for _, residency in self.gathered for line in residency.describe()]

    def refuse_replaced(self) -> None:
        """Refuse a call with another module in the place of one whose blocks are gathered.

        Raises:
            OffloadStateError: There is one; by name.
        """
        for member, _ in self.gathered:
            if self.component(member.name) is not member.owner.module:
                raise OffloadStateError(
                    f"component {member.name!r} was replaced, and this rank holds a part of the former one's blocks; put it back, or call "
                    "disable_omni_offload() on all ranks with it in its place"
                )

    @override
    def abandon(self) -> None:
        names = ", ".join(member.name for member, _ in self.gathered)
        self._gathering.end("the pipeline was dropped without being disabled")  # nobody knows whether the other ranks have done so
        super().abandon()
        raise OffloadStateError(f"{self._gathering.ended}, and the blocks of {names} hold no weights any more: load these components again")
