"""The components of one pipeline that offload owns: taken, arranged within the budget, prepared, given up; and those that come later."""

import functools
import weakref
from collections.abc import Callable

import torch

from omni_offload.accelerator import Accelerator
from omni_offload.backends.failures import first_error, raise_error
from omni_offload.backends.lock import CallLock
from omni_offload.backends.owners import Member, close_unused, owner_of
from omni_offload.backends.replaced import Hooks
from omni_offload.backends.room import Room
from omni_offload.backends.streamed import StreamedResidency, stream
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.config import ResidentPlacement
from omni_offload.discovery import Problems, declared_lists, module_at
from omni_offload.errors import ComponentPathError
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan, Treatment, resolve_again
from omni_offload.residency import ResidencyContext

__all__ = ["ManagedComponents"]


class ManagedComponents:
    """The components of one pipeline, as far as offload owns them.

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
        self.hooks: Hooks | None = None
        self._pipeline = weakref.ref(pipeline)
        self._declared = [path for paths in declared_lists(pipeline, Problems("")).values() for path in paths]
        self.unplanned: tuple[str, ...] = ()
        self.replan(plan)
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

    def manages(self, member: Member) -> bool:
        """Whether a component is managed still: not after disable, and not once another stands in its place."""
        return not self._closed and self.members.get(member.name) is member

    def renew(self, member: Member) -> None:
        """Take in what changed in a component that stays, as far as the budget holds it."""
        member.owner.renew(lambda: self.room.make([member]))
