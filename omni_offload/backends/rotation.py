"""Components take turns on the device: which of them are there, and what happens when a call begins and ends.

Every strategy uses it, and the mixin's own pair of methods. One rotation manages one pipeline.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from omni_offload.accelerator import Accelerator
from omni_offload.backends.activation import Activation
from omni_offload.backends.components import ManagedComponents
from omni_offload.backends.explain import OnHost
from omni_offload.backends.failures import first_error, run_repeatable_steps
from omni_offload.backends.owners import Member
from omni_offload.backends.replaced import take_in_components
from omni_offload.backends.streamed import StreamedResidency
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.plan import ResolvedOffloadPlan
from omni_offload.residency import ModuleResidency

__all__ = ["Member", "Rotation"]


class Rotation(ManagedComponents):
    """The components of one pipeline, and which of them are on the device.

    Attributes:
        calls: The pipeline's calls that run, outermost first.

    Args:
        pipeline: The pipeline; only a weak reference is kept.
        plan: What is done with each component.
        accelerator: The device.
    """

    def __init__(self, pipeline: object, plan: ResolvedOffloadPlan, accelerator: Accelerator) -> None:
        super().__init__(pipeline, plan, accelerator)
        self.calls: list[object] = []
        self._keep = plan.config.keep_between_calls
        self._failures: list[tuple[int, ModuleResidency]] = []
        self._clock = 0
        self._unsettled = False

    # ---- use ---------------------------------------------------------------------------------------------------------------

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

    def _arrange_again(self, group: Sequence[Member]) -> None:
        """Choose resident blocks anew: of all where one has another size (an adapter came, or went), else by what passes took."""
        streamed = [(one, residency) for one in group if isinstance(residency := one.owner.residency, StreamedResidency)]
        resized = any(residency.resized for _, residency in streamed)
        for one, residency in streamed:
            if not one.owner.active and (resized or residency.learn()):
                self.arrange(one, if_better=not resized)

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
