"""Components take turns on the device: which of them are there, and what happens when a call begins and ends.

Every strategy uses it, and the mixin's own pair of methods. One rotation manages one pipeline.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence

import torch

from omni_offload.accelerator import Accelerator
from omni_offload.backends.activation import Activation
from omni_offload.backends.explain import OnHost
from omni_offload.backends.failures import first_error, raise_error, run_repeatable_steps
from omni_offload.backends.lock import CallLock
from omni_offload.backends.owners import Member, close_unused, owner_of
from omni_offload.backends.replaced import Hooks, take_in_components
from omni_offload.backends.room import Room
from omni_offload.backends.streamed import StreamedResidency, stream
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.config import ResidentPlacement
from omni_offload.discovery import Problems, declared_lists, module_at
from omni_offload.errors import ComponentPathError
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan, Treatment, resolve_again
from omni_offload.residency import ModuleResidency, ResidencyContext

__all__ = ["Member", "Rotation"]

logger = logging.getLogger(__name__)


class Rotation:
    """The components of one pipeline, and which of them are on the device.

    Attributes:
        unplanned: The declared paths that the plan leaves out: they were None when it was made, or held no weights.

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
        lockable = int(config.dlo_host_registration_limit_gib * 2**30)
        self.context = ResidencyContext(accelerator, config.pin_cpu_memory, host_limit=config.host_memory, lockable=lockable)
        self.members: dict[str, Member] = {}
        self.room = Room(plan, self.members)
        self.calls: list[object] = []
        self.hooks: Hooks | None = None
        self._pipeline = weakref.ref(pipeline)
        self._declared = [path for paths in declared_lists(pipeline, Problems("")).values() for path in paths]
        self.unplanned: tuple[str, ...] = ()
        self.replan(plan)
        self._keep = config.keep_between_calls
        self._failures: list[tuple[int, ModuleResidency]] = []
        self._clock = 0
        self._unsettled = False
        self._closed = False

    # ---- enable and disable ------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take ownership of every component, and check the budgets. Nothing is moved.

        Raises:
            OffloadStateError: Another owner manages a component in another way.
            OffloadConfigError: The budget does not hold what has to be on the device at once.
        """
        pipeline = self._pipeline()
        for planned in self.plan.components:
            self.take(planned, module_at(pipeline, planned.path))
        for member in self.members.values():
            self.arrange(member)
        self.room.check()

    def take(self, planned: PlannedComponent, module: torch.nn.Module) -> Member:
        """Take ownership of one component; nothing is moved."""
        streams = planned.treatment is Treatment.STREAM
        make = functools.partial(self._make_streamed, planned) if streams else None
        owner = owner_of(module, planned.path, planned.treatment, self.context, make)
        member = self.members[planned.path] = Member(planned, owner)  # before it counts, so that an interrupt is undone
        owner.subscribers.add(self)
        return member

    def _make_streamed(self, planned: PlannedComponent) -> StreamedResidency:
        config = self.plan.config
        checkpoint = config.options_for(planned.kind).checkpoint
        return stream(self._pipeline(), planned, slots=config.slots, context=self.context, checkpoint=checkpoint)

    def arrange(self, member: Member, *, if_better: bool = False) -> None:
        """Choose a streamed component's resident blocks within what the budget leaves beside what stays and moves with it.

        Args:
            member: The component; nothing is done for one that does not stream, or that other pipelines use too.
            if_better: Leave them as they are, unless others are worth their copies.

        Raises:
            OffloadConfigError: The blocks that were asked to stay do not fit.
        """
        residency = member.owner.residency
        if isinstance(residency, StreamedResidency) and len(member.owner.subscribers) == 1:
            options = self.plan.config.options_for(member.planned.kind)
            residency.arrange(
                number=member.planned.resident_layers,
                limit=self.room.left_for(member),
                beside=self.room.slots_beside(member),
                leading=options.resident_placement is ResidentPlacement.LEADING,
                if_better=if_better,
            )

    def _arrange_again(self, group: Sequence[Member]) -> None:
        """Choose resident blocks anew: of all where one has another size (an adapter came, or went), else by what passes took."""
        streamed = [(one, residency) for one in group if isinstance(residency := one.owner.residency, StreamedResidency)]
        resized = any(residency.resized for _, residency in streamed)
        for one, residency in streamed:
            if not one.owner.active and (resized or residency.learn()):
                self.arrange(one, if_better=not resized)

    def prepare(self) -> None:
        """Make the host masters, and bring to the device what stays there. A failure or interrupt leaves it to `give_up`."""
        sizes = sorted(self.members.values(), key=lambda member: -member.owner.residency.host_bytes)
        limit = self.context.host_limit
        if limit is not None and sum(member.owner.residency.master_bytes for member in sizes) > limit:
            self.context.host.reserve_staging()
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
        self._closed = True
        owners = [member.owner for member in self.members.values()]
        steps: list[tuple[str, Callable[[], None]]] = []
        steps += [(f"give up {owner.name}", functools.partial(owner.unsubscribe, self, undo=undo)) for owner in owners]
        steps += [(f"give up dropped pipelines of {owner.name}", owner.drop_orphans) for owner in owners]
        contexts = {id(context): context for context in (self.context, *(owner.context for owner in owners))}
        error = run_cleanup_steps([*steps, ("unpin host memory", lambda: close_unused(contexts.values()))])
        if error is None:
            self.members.clear()
        return error

    def component(self, path: str) -> torch.nn.Module | None:
        """Return what stands at a component's path now; None where no module does."""
        try:
            return module_at(self._pipeline(), path)
        except ComponentPathError:
            return None

    def resolve(self) -> ResolvedOffloadPlan:
        """Return the plan of the pipeline as it is now."""
        return resolve_again(self._pipeline(), self.plan.config)

    def replan(self, plan: ResolvedOffloadPlan) -> None:
        """Go on with another plan for the same pipeline; what is managed already is left as it is."""
        planned = {path for component in plan.components for path in (component.path, *component.aliases)}
        self.plan = self.room.plan = plan
        self.unplanned = tuple(path for path in self._declared if path not in planned)

    @property
    def orphaned(self) -> bool:
        """Whether the pipeline was dropped without being disabled."""
        return self._pipeline() is None

    def abandon(self) -> None:
        """Give up everything for a pipeline that is gone."""
        raise_error(first_error(self.hooks.remove() if self.hooks is not None else None, self.give_up()))

    # ---- use ---------------------------------------------------------------------------------------------------------------

    def manages(self, member: Member) -> bool:
        """Whether a component is managed still: not after disable, and not once another stands in its place."""
        return not self._closed and self.members.get(member.name) is member

    def onload(self, member: Member, activation: Activation) -> None:
        """Bring a component to the device for an activation, with its co-residents, and bind it there.

        The current stream waits for the copies. What is not needed leaves first.

        Raises:
            torch.OutOfMemoryError: As raised.
            OffloadStateError: The budget does not hold it beside the components that run now.
        """
        owner = member.owner
        if member.stays or owner.active:
            if member.stays:
                self.renew(member)
            owner.activate(activation)
            return
        group = self.room.companions(member)
        for one in group:
            one.owner.residency.validate()
        self._arrange_again(group)
        self.room.make(group)
        self._clock += 1
        member.last_use = self._clock
        ahead, owner.fetched_ahead = owner.fetched_ahead, False
        copied = self._activate(group, activation)
        owner.residency.counters.misses += copied
        owner.residency.counters.prefetch_hits += ahead and not copied
        for other in group[1:]:
            other.last_use = self._clock
            other.owner.prefetch()
            other.owner.fetched_ahead = False
        self.room.order.use(member.name)
        self.room.fetch_ahead()

    def _activate(self, group: Sequence[Member], activation: Activation) -> bool:
        owner = group[0].owner
        try:
            return owner.activate(activation)
        except torch.OutOfMemoryError:
            owner.deactivate(activation)
            if not self.room.clear(group):
                raise
        return owner.activate(activation)  # with what was kept or fetched ahead out of the way

    def offload_when_done(self, member: Member, activation: Activation) -> None:
        """End an activation: the weights are their masters again; the device copies stay until others need the room."""
        member.owner.deactivate(activation)

    def note_failure(self, error: BaseException, residency: ModuleResidency) -> None:
        """Note that an error of the present call passed through the use of a component, or of a block."""
        if self.calls:
            self._failures.append((id(error), residency))

    def inactive_at(self, error: BaseException) -> list[OnHost]:
        """Return the components, and blocks of others, that were not in use where an error of the present call was raised."""
        used = [residency for known, residency in self._failures if known == id(error)]
        found: list[OnHost] = []
        for member in self.members.values():
            residency = member.owner.residency
            if not member.stays and residency not in used and not member.owner.active:
                found.append(OnHost(member.name, member.name, member.owner.module, residency))
            elif isinstance(residency, StreamedResidency):
                found += [one for one in residency.idle_blocks() if one.residency not in used]
        return found

    def renew(self, member: Member) -> None:
        """Take in what changed in a component that stays, as far as the budget holds it."""
        member.owner.renew(lambda: self.room.make([member]))

    # ---- calls -------------------------------------------------------------------------------------------------------------

    def begin_call(self, call: object) -> bool:
        """Enter a call, or a nested one: wait for the pipeline's other calls, and take in what changed since the last.

        Returns:
            Whether the pipeline is managed: another thread may have disabled the offload while this one waited.
        """
        self.lock.acquire(call)
        if self._closed:
            self.lock.release(call)
            return False
        self.calls.append(call)
        if len(self.calls) > 1:
            return True
        if (recorder := self.accelerator.recorder) is not None:
            recorder.call_begins()
        if self._unsettled:
            self._settle()
        self._unsettled = True
        self.room.order.begin()
        if self.hooks is not None:
            take_in_components(self, self.hooks)
            self.hooks.mend()
        for member in self.members.values():
            if member.stays:
                self.renew(member)
            elif isinstance(residency := member.owner.residency, StreamedResidency):
                residency.time_passes()
        return True

    def end_call(self, call: object, *, failed: bool) -> BaseException | None:
        """Leave a call. With the outermost, everything that rotates leaves the device, unless `keep_between_calls`. Idempotent.

        Returns:
            The first failure; every step ran. Nothing is raised, so that the caller's own error is not lost.
        """
        if call not in self.calls:
            self.lock.release(call)
            return None
        steps: list[tuple[str, Callable[[], None]]] = [("end what was interrupted", functools.partial(self._leave_inner, call))]
        outermost = self.calls[0] is call
        if outermost:
            steps += [("settle", self._settle)] if failed else [("learn the order", self.room.order.end)]
            steps += [(f"release {m.name}", functools.partial(self._release, m)) for m in self.members.values()]
        error = first_error(run_repeatable_steps(steps), run_cleanup_steps([("end the call", functools.partial(self._leave, call))]))
        if error is None and outermost:
            self._unsettled = False
        return error

    def _leave_inner(self, call: object) -> None:
        for token in self.lock.after(call):
            if isinstance(token, Activation):
                token.leave()
            self.lock.release(token)

    def _leave(self, call: object) -> None:
        del self.calls[self.calls.index(call) :]
        if not self.calls:
            if (recorder := self.accelerator.recorder) is not None:
                recorder.call_ends()
            self._failures.clear()
        self.lock.release(call)

    def _release(self, member: Member) -> None:
        if member.stays:
            self.renew(member)  # a copy that the call has cast away from is held for nothing
            return
        if not self._keep:
            member.owner.evict()
        member.owner.context.slots.let_go()
        if member.last_use:
            member.owner.residency.validate(thorough=True)

    def _settle(self) -> None:
        """Repair what an interrupt left."""
        self._unsettled = False
        for member in self.members.values():
            member.owner.settle(self)

    # ---- on demand -----------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the device now of everything that rotates and does not run; waits for other threads' calls."""
        self.lock.run(self._evict)

    def _evict(self) -> None:
        for member in self.members.values():
            member.owner.evict()
            member.owner.context.slots.let_go()

    def refresh(self) -> None:
        """Count every device copy as stale, so that each master is read again; waits for other threads' calls."""
        self.lock.run(self._forget_copies)

    def _forget_copies(self) -> None:
        for member in self.members.values():
            member.owner.residency.forget_copies()
