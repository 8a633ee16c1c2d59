"""Components take turns on the device: evict before load, keep what the budget holds, fetch the next one ahead.

Every strategy uses it, and the mixin's own pair of methods. One rotation manages one pipeline.
"""

import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import attrs
import torch

from omni_offload.accelerator import Accelerator
from omni_offload.backends.lock import CallLock
from omni_offload.backends.order import UseOrder
from omni_offload.backends.owners import ComponentOwner, owner_of
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan, Treatment
from omni_offload.residency import ResidencyContext

__all__ = ["Member", "Rotation"]

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Member:
    """One component of the rotation."""

    planned: PlannedComponent
    owner: ComponentOwner
    last_use: int = 0

    @property
    def name(self) -> str:
        """Its path in the pipeline."""
        return self.planned.path

    @property
    def stays(self) -> bool:
        """Whether it is on the device while offload is enabled."""
        return self.planned.treatment is Treatment.STAY


class Hooks(Protocol):
    """What brings the rotation into a component's methods."""

    def renew(self) -> None:
        """Hook the components as they are now."""


class Rotation:
    """The components of one pipeline, and which of them are on the device.

    Args:
        pipeline: The pipeline; only a weak reference is kept.
        plan: What is done with each component.
        accelerator: The device.
    """

    def __init__(self, pipeline: object, plan: ResolvedOffloadPlan, accelerator: Accelerator) -> None:
        config = plan.config
        self.plan = plan
        self.accelerator = accelerator
        self.lock = CallLock(type(pipeline).__name__)
        self.context = ResidencyContext(accelerator, config.pin_cpu_memory, host_limit=config.host_memory)
        self.members: dict[str, Member] = {}
        self.calls: list[object] = []
        self._pipeline = weakref.ref(pipeline)
        self._budget = config.device_memory
        self._keep = config.keep_between_calls
        self._order = UseOrder([c.path for c in plan.components if c.treatment is not Treatment.STAY])
        self.hooks: Hooks | None = None
        self._clock = 0
        self._unsettled = False

    # ---- enable and disable ------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take ownership of every component, and check the budgets. Nothing is moved.

        Raises:
            OffloadStateError: Another owner manages a component in another way.
            OffloadConfigError: The budget does not hold what has to be on the device at once.
        """
        pipeline = self._pipeline()
        for planned in self.plan.components:
            self._claim(planned, operator.attrgetter(planned.path)(pipeline))
        self._check_budget()

    def _claim(self, planned: PlannedComponent, module: torch.nn.Module) -> Member:
        owner = owner_of(module, planned.path, planned.treatment.value, self.context)
        owner.subscribers.add(self)
        member = self.members[planned.path] = Member(planned, owner)
        return member

    def prepare(self) -> None:
        """Make the host masters, and bring to the device what stays there. A failure or interrupt leaves it to `undo`."""
        sizes = sorted(self.members.values(), key=lambda member: -member.owner.residency.host_bytes)
        limit = self.context.host_limit
        if limit is not None and sum(member.owner.residency.padded_bytes for member in sizes) > limit:
            self.context.reserve_staging()
        for member in sizes:
            member.owner.residency.prepare(keep_origin=True)
        for member in self.members.values():
            if member.stays:
                member.owner.residency.load()

    def commit(self) -> None:
        """Let go of what only an undo needs."""
        for member in self.members.values():
            member.owner.residency.commit()

    def give_up(self, *, undo: bool = False) -> BaseException | None:
        """Give up every component: its weights go to the host (or, undo, to where they were), nothing stays pinned.

        Returns:
            The first failure; every step ran.
        """
        steps = [(f"give up {m.name}", functools.partial(m.owner.unsubscribe, self, undo=undo)) for m in self.members.values()]
        error = run_cleanup_steps([*steps, ("unpin host memory", self._close)])
        if error is None:
            self.members.clear()
        return error

    def _close(self) -> None:
        if not any(member.owner.subscribers for member in self.members.values()):
            self.context.close()

    def _check_budget(self) -> None:
        if self._budget is None:
            return
        stay = sum(member.owner.residency.padded_bytes for member in self.members.values() if member.stays)
        rotating = [member for member in self.members.values() if not member.stays]
        needs = {" + ".join(m.name for m in group): _padded(group) for group in map(self.companions, rotating)}
        worst = max(needs, key=lambda name: needs[name], default="")
        if stay + needs.get(worst, 0) > self._budget:
            raise OffloadConfigError(
                f"device_memory={self._budget} bytes was asked for, and {self.plan.pipeline_class} needs {stay + needs.get(worst, 0)}: "
                f"{stay} for what stays on the device and {needs.get(worst, 0)} for {worst or 'nothing else'}; raise the budget, select "
                "more components, or use mode 'layer'"
            )

    # ---- use ---------------------------------------------------------------------------------------------------------------

    def companions(self, member: Member) -> list[Member]:
        """Return the components that move together with one, itself first."""
        for group in self.plan.co_residents:
            if member.name in group:
                others = (self.members.get(name) for name in group if name != member.name)
                return [member, *(other for other in others if other is not None and not other.stays)]
        return [member]

    def onload(self, member: Member, activation: object) -> None:
        """Bring a component to the device for an activation, with its co-residents, and bind it there.

        The current stream waits for the copies. What is not needed leaves first.

        Raises:
            torch.OutOfMemoryError: As raised.
            OffloadStateError: The budget does not hold it beside the components that run now.
        """
        owner = member.owner
        if member.stays or owner.active:
            if member.stays:
                owner.renew()
            owner.activate(activation)
            return
        group = self.companions(member)
        for one in group:
            one.owner.residency.prepare()
            one.owner.residency.validate()
        self._make_room(group)
        self._count_use(member)
        owner.activate(activation)
        for other in group[1:]:
            other.owner.prefetch()
            other.owner.fetched_ahead = False
        self._order.use(member.name)
        self._fetch_ahead()

    def offload_when_done(self, member: Member, activation: object) -> None:
        """End an activation: the weights are their masters again; the device copies stay until others need the room."""
        member.owner.deactivate(activation)

    def _count_use(self, member: Member) -> None:
        self._clock += 1
        member.last_use = self._clock
        counters, owner = member.owner.residency.counters, member.owner
        if not owner.residency.fetched:
            counters.misses += 1
        elif owner.fetched_ahead:
            counters.prefetch_hits += 1
        owner.fetched_ahead = False

    def _make_room(self, group: Sequence[Member]) -> None:
        idle = [member for member in self._fetched() if member not in group]
        if self._budget is None:
            for member in idle:
                member.owner.evict()
            return
        for member in sorted(idle, key=lambda member: member.last_use):
            if self._fits(group):
                return
            member.owner.evict()
        if not self._fits(group):
            running = [member.name for member in self._fetched() if member.owner.active] or ["what stays on the device"]
            raise OffloadStateError(
                f"{' + '.join(m.name for m in group)} needs {_padded(group)} bytes beside {', '.join(running)}, which is more than "
                f"device_memory={self._budget} bytes holds; raise the budget, or declare them in _co_resident_modules so that it is "
                "checked when offload is enabled"
            )

    def _fetched(self) -> list[Member]:
        return [m for m in self.members.values() if not m.stays and m.owner.residency.device_bytes]

    def _fits(self, group: Sequence[Member]) -> bool:
        held = sum(member.owner.residency.device_bytes for member in self.members.values() if member not in group)
        return self._budget is not None and held + _padded(group) <= self._budget

    def _fetch_ahead(self) -> None:
        """Fetch what comes next, as far as the budget holds it; a failure only costs time."""
        if self._budget is None:
            return
        for name in self._order.upcoming():
            member = self.members[name]
            group = self.companions(member)
            if any(m.owner.residency.fetched or not m.owner.residency.overlaps for m in group):
                if not all(m.owner.residency.fetched for m in group):
                    return
                continue
            if not self._room_ahead(group):
                return
            try:
                for one in group:
                    one.owner.prefetch()
            except torch.OutOfMemoryError:
                logger.warning("no device memory to fetch %s ahead; device_memory is set higher than what is free", name)
                return

    def _room_ahead(self, group: Sequence[Member]) -> bool:
        """Evict idle components that are needed later than a group, or not again, until it fits."""
        due = min(self._order.distance(member.name) for member in group)
        idle = [m for m in self._fetched() if not m.owner.active and m not in group and self._order.distance(m.name) > due]
        held = sum(m.owner.residency.device_bytes for m in self.members.values() if m not in group and m not in idle)
        if self._budget is None or held + _padded(group) > self._budget:
            return False
        for member in sorted(idle, key=lambda m: -self._order.distance(m.name)):
            if self._fits(group):
                break
            member.owner.evict()
        return self._fits(group)

    # ---- calls -------------------------------------------------------------------------------------------------------------

    def begin_call(self, call: object) -> None:
        """Enter a call, or a nested one: wait for the pipeline's other calls, and take in what changed since the last."""
        self.lock.acquire(call)
        self.calls.append(call)
        if len(self.calls) > 1:
            return
        if self._unsettled:
            self._settle()
        self._unsettled = True
        self._order.begin()
        replaced = list(self._replaced())
        if replaced and self.hooks is not None:
            logger.info("%s replaced; the successors are managed from here on", ", ".join(m.name for m in replaced))
            self.hooks.renew()
        for member in self.members.values():
            if member.stays:
                member.owner.renew()

    def end_call(self, call: object, *, failed: bool) -> BaseException | None:
        """Leave a call. With the outermost, everything that rotates leaves the device, unless `keep_between_calls`.

        Returns:
            The first failure; every step ran. Nothing is raised, so that the caller's own error is not lost.
        """
        if call not in self.calls:
            self.lock.release(call)
            return None
        steps: list[tuple[str, Callable[[], None]]] = []
        if len(self.calls) == 1:
            steps = [("settle", self._settle)] if failed else [("learn the order", self._order.end)]
            steps += [(f"release {m.name}", functools.partial(self._release, m)) for m in self.members.values() if not m.stays]
        error = run_cleanup_steps([*steps, ("end the call", lambda: self._leave(call))])
        if error is None:
            self._unsettled = False
        return error

    def _leave(self, call: object) -> None:
        if call in self.calls:
            self.calls.remove(call)
        self.lock.release(call)

    def _release(self, member: Member) -> None:
        if not self._keep:
            member.owner.evict()
        if member.last_use:
            member.owner.residency.validate(thorough=True)

    def _settle(self) -> None:
        """Repair what an interrupt left: outside a call no activation of the pipeline runs."""
        self._unsettled = False
        for member in self.members.values():
            if member.owner.subscribers == {self}:
                member.owner.settle()

    def _replaced(self) -> Iterator[Member]:
        """Manage components that were put in the place of others since the last call; yield them."""
        pipeline = self._pipeline()
        for name, member in list(self.members.items()):
            module = operator.attrgetter(name)(pipeline)
            if module is member.owner.module or not isinstance(module, torch.nn.Module):
                continue
            member.owner.unsubscribe(self)
            fresh = self._claim(member.planned, module)
            fresh.owner.residency.prepare()
            if fresh.stays:
                fresh.owner.residency.load()
            yield fresh

    def release(self) -> None:
        """Free the device now of everything that rotates and does not run."""
        token = object()
        self.lock.acquire(token)
        try:
            for member in self.members.values():
                member.owner.evict()
        finally:
            self.lock.release(token)

    def refresh(self) -> None:
        """Count every device copy as stale, so that each master is read again."""
        for member in self.members.values():
            member.owner.residency.forget_copies()
            if member.stays:
                member.owner.renew()


def _padded(group: Sequence[Member]) -> int:
    return sum(member.owner.residency.padded_bytes for member in group)
