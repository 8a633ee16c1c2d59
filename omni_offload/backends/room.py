"""Who fits on the device beside whom: evict before load, keep what the budget holds, fetch the next one ahead."""

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from omni_offload.backends.order import UseOrder
from omni_offload.backends.owners import Member
from omni_offload.backends.streamed import StreamedResidency
from omni_offload.config import OffloadStrategy
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.plan import ResolvedOffloadPlan, Treatment
from omni_offload.residency import SlotPool

__all__ = ["Room"]

logger = logging.getLogger(__name__)


class Room:
    """The device memory that a rotation may use.

    Args:
        plan: What is done with each component, and under which budget.
        members: The components, as the rotation knows them now.

    Attributes:
        plan: What is done with each component, and which move together.
        order: The order in which components are used.
        fetches_ahead: Whether components are fetched before they are used; what is fetched, and evicted for it, depends on how far
            copies are.
    """

    def __init__(self, plan: ResolvedOffloadPlan, members: Mapping[str, Member]) -> None:
        self.plan = plan
        self._members = members
        self._budget = plan.config.device_memory
        self._limit = math.inf if self._budget is None else self._budget
        self.fetches_ahead = True
        self.order = UseOrder([c.path for c in plan.components if c.treatment is not Treatment.STAY])

    def companions(self, member: Member) -> list[Member]:
        """Return the components that move together with one, itself first."""
        for group in self.plan.co_residents:
            if member.name in group:
                others = (self._members.get(name) for name in group if name != member.name)
                return [member, *(other for other in others if other is not None and not other.stays)]
        return [member]

    def check(self) -> None:
        """Check that the budget holds what has to be on the device at once.

        Raises:
            OffloadConfigError: It does not; the message says what is needed.
        """
        if self._budget is None:
            return
        stay = sum(member.owner.residency.padded_bytes for member in self._members.values() if member.stays)
        rotating = [member for member in self._members.values() if not member.stays]
        needs = {" + ".join(m.name for m in group): _padded(group) for group in map(self.companions, rotating)}
        worst = max(needs, key=lambda name: needs[name], default="")
        if stay + needs.get(worst, 0) > self._budget:
            smaller = "mode 'layer'" if self.plan.strategy is OffloadStrategy.MODEL_LEVEL else "fewer slots"
            raise OffloadConfigError(
                f"device_memory={self._budget} bytes was asked for, and {self.plan.pipeline_class} needs "
                f"{stay + needs.get(worst, 0)}: {stay} for what stays on the device and {needs.get(worst, 0)} for "
                f"{worst or 'nothing else'}; raise the budget, select more components, or use {smaller}"
            )

    def left_for(self, member: Member) -> int | None:
        """Return the device bytes that a component may take, all slots included, beside what stays and moves with it; None: no budget."""
        if self._budget is None:
            return None
        others = {one.name: one for one in (*self.companions(member)[1:], *(m for m in self._members.values() if m.stays))}
        return self._budget - _padded(list(others.values())) + self.slots_beside(member)

    def slots_beside(self, member: Member) -> int:
        """Return the bytes that a component's slots take at the least: as many as what moves with it needs, which has them in common."""
        pool = member.owner.context.slots
        others = (one.owner.residency for one in self.companions(member)[1:])
        return max((one.pool_bytes for one in others if isinstance(one, StreamedResidency) and one.pool is pool), default=0)

    def make(self, group: Sequence[Member]) -> None:
        """Evict idle components until a group fits: all without a budget, else the least recently used first, then what is fetched ahead.

        Raises:
            OffloadStateError: The budget does not hold the group beside the components that run now.
        """
        idle = [member for member in self._fetched() if member not in group]
        for pool in _pools(group):
            pool.keep()  # one ring after another: what takes memory again in every step would be these
        if self._budget is None:
            for member in () if group[0].stays else idle:
                member.owner.evict()
            return
        for member in sorted(idle, key=lambda member: (member.owner.fetched_ahead, member.last_use)):
            if self._fits(group):
                return
            member.owner.evict()
        if not self._fits(group):
            for pool in _pools(group):
                pool.trim()  # slots as large as another ring's blocks
        if not self._fits(group):
            running = [member.name for member in self._fetched() if member.owner.active] or ["what stays on the device"]
            raise OffloadStateError(
                f"{' + '.join(m.name for m in group)} needs {_padded(group)} bytes beside {', '.join(running)}, which is more than "
                f"device_memory={self._budget} bytes holds; raise the budget, or declare them in _co_resident_modules so that it is "
                "checked when offload is enabled"
            )

    def clear(self, group: Sequence[Member]) -> bool:
        """Evict everything idle but a group, for a device that holds less than the budget says; returns whether anything left."""
        return sum(member.owner.evict() for member in self._fetched() if member not in group) > 0

    def fetch_ahead(self) -> None:
        """Fetch the next component that is not there, where the budget holds it; running out of memory only costs time.

        One at a time: what the pipeline itself copies meanwhile would wait behind all that is queued. Every use tries again.
        """
        if self._budget is None or not self.fetches_ahead:
            return
        if any(m.owner.fetched_ahead and m.owner.residency.in_flight for m in self._members.values()):
            return
        for name in dict.fromkeys(self.order.upcoming()):
            member = self._members.get(name)
            if member is None:
                continue
            group = self.companions(member)
            missing = [one for one in group if not one.owner.residency.fetched]
            if not missing:
                continue
            if any(not one.owner.residency.overlaps for one in missing) or not self._room_ahead(group):
                return
            try:
                for one in missing:
                    one.owner.prefetch()
            except torch.OutOfMemoryError:
                logger.warning("no device memory to fetch %s ahead; device_memory is set higher than what is free", name)
            return

    def _room_ahead(self, group: Sequence[Member]) -> bool:
        """Evict idle components that are needed later than a group, or not again, until it fits."""
        for member in group:
            member.owner.residency.validate()
        due = min(self.order.distance(member.name) for member in group)
        idle = [m for m in self._fetched() if not m.owner.active and m not in group and self.order.distance(m.name) > due]
        kept = [m for m in self._members.values() if m not in group and m not in idle]
        if not self._holds(kept, group):
            return False
        for member in sorted(idle, key=lambda m: -self.order.distance(m.name)):
            if self._fits(group):
                break
            member.owner.evict()
        return self._fits(group)

    def _fetched(self) -> list[Member]:
        return [m for m in self._members.values() if not m.stays and m.owner.residency.device_bytes]

    def _fits(self, group: Sequence[Member]) -> bool:
        return self._holds([member for member in self._members.values() if member not in group], group)

    def _holds(self, others: Sequence[Member], group: Sequence[Member]) -> bool:
        needed = _pools(group)
        held = sum(member.owner.residency.own_device_bytes for member in others)
        held += sum(pool.nbytes for pool in _pools(others) if pool not in needed)
        return held + sum(needed.values()) + sum(member.owner.residency.own_padded_bytes for member in group) <= self._limit


def _padded(group: Sequence[Member]) -> int:
    """Return the device bytes of components that are there together; those that stream have the slots in common."""
    residencies = [member.owner.residency for member in group]
    slots: dict[SlotPool, int] = {}
    for residency in residencies:
        if isinstance(residency, StreamedResidency):
            slots[residency.pool] = max(slots.get(residency.pool, 0), residency.pool_bytes)
    return sum(residency.own_padded_bytes for residency in residencies) + sum(slots.values())


def _pools(members: Sequence[Member]) -> dict[SlotPool, int]:
    """Return the slots that some components have, and the bytes that these take once every one of them uses them."""
    found: dict[SlotPool, int] = {}
    for member in members:
        residency = member.owner.residency
        if isinstance(residency, StreamedResidency) and residency.slots:
            pool = residency.pool
            found[pool] = max(found.get(pool, 0), pool.nbytes_with(residency.slots, residency.slot_bytes))
    return found
