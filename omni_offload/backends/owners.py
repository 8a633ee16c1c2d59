"""One owner a component: its residency, and who uses it now. Pipelines that share a component share its owner."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
import torch

from omni_offload.errors import OffloadStateError
from omni_offload.plan import PlannedComponent, Treatment
from omni_offload.residency import ModuleResidency, ResidencyContext

if TYPE_CHECKING:
    from omni_offload.backends.activation import Activation
    from omni_offload.backends.components import ManagedComponents

__all__ = ["ComponentOwner", "Member", "close_unused", "owner_of"]

_OWNERS: "weakref.WeakValueDictionary[int, ComponentOwner]" = weakref.WeakValueDictionary()
_LOCK = threading.RLock()


class ComponentOwner:
    """The residency of one component and its users.

    Attributes:
        module: The component.
        treatment: What its pipelines do with it; all the same.
        context: The host memory it shares with other components of the pipeline that was first.
        residency: Where its weights are.
        subscribers: The rotations that manage it; the weights are given up with the last.
        active: The activations that run now, of any pipeline and thread.
    """

    def __init__(
        self, module: torch.nn.Module, name: str, treatment: Treatment, context: ResidencyContext, residency: ModuleResidency
    ) -> None:
        self.module = module
        self.name = name
        self.treatment = treatment
        self.context = context
        self.residency = residency
        self.subscribers: set[ManagedComponents] = set()
        self.active: list[Activation] = []
        self.fetched_ahead = False
        self.lock = threading.RLock()

    @property
    def stays(self) -> bool:
        """Whether it is on the device while offload is enabled."""
        return self.treatment is Treatment.STAY

    def activate(self, activation: "Activation") -> bool:
        """Bind the weights to their device copies, for one activation more; the current stream waits for the copies.

        The caller has validated the residency.

        Returns:
            Whether anything had to be copied.
        """
        with self.lock:
            self.active.append(activation)
            copied = self.residency.fetch(validated=True) if len(self.active) == 1 else False
            self.residency.bind()
            if (recorder := self.context.accelerator.recorder) is not None:
                recorder.begins(self.name, whole=True)
            return copied

    def deactivate(self, activation: "Activation") -> None:
        """Bind the weights to their masters again when the last activation ends. Idempotent."""
        with self.lock:
            if activation in self.active:
                self.active.remove(activation)
                if (recorder := self.context.accelerator.recorder) is not None:
                    recorder.ends(self.name)
            self._let_go()

    def _let_go(self) -> None:
        if not self.active and not self.stays:
            self.residency.unbind()

    def prefetch(self) -> bool:
        """Queue the copies ahead of use; returns whether any were needed."""
        with self.lock:
            if self.active or self.residency.fetched:
                return False
            self.residency.fetch()
            self.fetched_ahead = True
            return True

    def evict(self) -> bool:
        """Let go of the device copies, unless something runs on them; returns whether they are gone."""
        with self.lock:
            if self.active or self.stays:
                return False
            if self.fetched_ahead:
                self.residency.counters.wasted_copies += 1
                self.fetched_ahead = False
            self.residency.drop()
            return True

    def settle(self, rotation: "ManagedComponents") -> None:
        """Repair what an interrupt left: without uses nothing may be bound (or, for one that stays, everything must be)."""
        with self.lock:
            self.active[:] = [a for a in self.active if a.rotation is not rotation or rotation.lock.holds(a)]
            if not self.active and not self.stays:
                self.residency.unbind(force=True)

    def renew(self, make_room: Callable[[], None]) -> None:
        """For a component that stays on the device: take in tensors that were added or replaced since.

        Args:
            make_room: Called before it is loaded again, with its new size known; may refuse.
        """
        with self.lock:
            if self.active or (self.residency.loaded and not self.residency.outdated()):
                return
            self.residency.unbind()
            self.residency.validate(thorough=True)
            make_room()
            self.residency.fetch()
            self.residency.bind()

    def unsubscribe(self, rotation: "ManagedComponents", *, undo: bool = False) -> None:
        """Give up the component for one pipeline, and with the last the weights: to the host, or (undo) to where they were."""
        with self.lock:
            self.subscribers.discard(rotation)
            self.active[:] = [activation for activation in self.active if activation.rotation is not rotation]
            if self.subscribers:
                self._let_go()
                return
            self.residency.restore(copy_back=self.stays and not undo, to_origin=undo)
            with _LOCK:
                if _OWNERS.get(id(self.module)) is self:
                    del _OWNERS[id(self.module)]

    def drop_orphans(self) -> None:
        """Give up for pipelines that were dropped without being disabled; the component's hooks keep their rotations alive."""
        for rotation in list(self.subscribers):
            if rotation.orphaned:
                rotation.abandon()


@attrs.define(eq=False)
class Member:
    """One component of a rotation."""

    planned: PlannedComponent
    owner: ComponentOwner
    last_use: int = 0

    @property
    def name(self) -> str:
        """Its path in the pipeline."""
        return self.planned.path

    @property
    def names(self) -> tuple[str, ...]:
        """All its paths in the pipeline."""
        return self.planned.path, *self.planned.aliases

    @property
    def stays(self) -> bool:
        """Whether it is on the device while offload is enabled."""
        return self.owner.stays


def owner_of(
    module: torch.nn.Module,
    name: str,
    treatment: Treatment,
    context: ResidencyContext,
    make_residency: Callable[[], ModuleResidency] | None = None,
) -> ComponentOwner:
    """Return the component's owner: the one that another pipeline has made, or a new one. Nothing is moved.

    Args:
        module: The component.
        name: How messages call it.
        treatment: What is done with it.
        context: The host memory of the pipeline that asks.
        make_residency: Makes a new owner's residency; None: one that moves the component as a whole.

    Raises:
        OffloadStateError: Another pipeline manages it on another device, with other pinning or in another way; or it manages only
            a part of it.
    """
    present = _OWNERS.get(id(module))
    if present is not None:
        present.drop_orphans()
    with _LOCK:
        owner = _OWNERS.get(id(module))
        if owner is None or owner.module is not module or not owner.subscribers:
            whole = functools.partial(ModuleResidency, module, context.accelerator.device, name=name, context=context)
            owner = ComponentOwner(module, name, treatment, context, (make_residency or whole)())
            _OWNERS[id(module)] = owner
            return owner
    if not owner.residency.shareable:
        raise OffloadStateError(
            f"component {name!r} ({type(module).__name__}) is managed for another pipeline, of whose blocks this rank holds a part only; "
            "disable the other pipeline first"
        )
    asked = (str(context.accelerator.device), context.pin_memory, treatment.value)
    found = (str(owner.residency.device), owner.context.pin_memory, owner.treatment.value)
    if asked != found:
        raise OffloadStateError(
            f"component {name!r} ({type(module).__name__}) is managed for another pipeline as {owner.name!r} with (device, pinning, "
            f"treatment) {found}, and {asked} was asked for; disable the other pipeline first, or ask for the same"
        )
    return owner


def close_unused(contexts: Iterable[ResidencyContext]) -> None:
    """Unpin the host memory of contexts of which no component is managed any more. Blocks until queued copies are done."""
    with _LOCK:
        used = {id(owner.context) for owner in _OWNERS.values() if owner.subscribers}
    for context in contexts:
        if id(context) not in used:
            context.close()
