"""One owner a component: its residency, and who uses it now. Pipelines that share a component share its owner."""

import threading
import weakref
from typing import Any

import torch

from omni_offload.errors import OffloadStateError
from omni_offload.residency import ModuleResidency, ResidencyContext

__all__ = ["ComponentOwner", "owner_of"]

_OWNERS: "weakref.WeakValueDictionary[int, ComponentOwner]" = weakref.WeakValueDictionary()
_LOCK = threading.RLock()


class ComponentOwner:
    """The residency of one component and its users.

    Attributes:
        module: The component.
        treatment: What its pipelines do with it; all the same.
        residency: Where its weights are.
        subscribers: The rotations that manage it; the weights are given up with the last.
        active: The activations that run now, of any pipeline and thread.
    """

    def __init__(self, module: torch.nn.Module, name: str, treatment: str, context: ResidencyContext) -> None:
        self.module = module
        self.name = name
        self.treatment = treatment
        self.pin_memory = context.pin_memory
        self.residency = ModuleResidency(module, context.accelerator.device, name=name, context=context)
        self.subscribers: set[Any] = set()
        self.active: list[Any] = []
        self.fetched_ahead = False
        self.lock = threading.RLock()

    def activate(self, activation: object) -> bool:
        """Bind the weights to their device copies, for one activation more.

        Returns:
            Whether this is the outermost one.
        """
        with self.lock:
            self.active.append(activation)
            if len(self.active) > 1:
                return False
            self.residency.fetch()
            self.residency.bind()
            return True

    def deactivate(self, activation: object) -> None:
        """Bind the weights to their masters again when the last activation ends. Idempotent."""
        with self.lock:
            if activation in self.active:
                self.active.remove(activation)
            if not self.active and self.treatment != "stay":
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
            if self.active or self.treatment == "stay":
                return False
            if self.fetched_ahead:
                self.residency.counters.wasted_copies += 1
                self.fetched_ahead = False
            self.residency.drop()
            return True

    def settle(self) -> None:
        """Repair what an interrupt left: nothing runs, so nothing may be bound (or, for one that stays, everything must be)."""
        with self.lock:
            self.active.clear()
            if self.treatment != "stay":
                self.residency.unbind(force=True)

    def renew(self) -> None:
        """For a component that stays on the device: take in tensors that were added or replaced since."""
        with self.lock:
            if not self.active and self.residency.outdated():
                self.residency.unbind()
                self.residency.validate(thorough=True)
                self.residency.load()

    def unsubscribe(self, rotation: object, *, undo: bool = False) -> None:
        """Give up the component for one pipeline, and with the last the weights: to the host, or (undo) to where they were."""
        with self.lock:
            self.subscribers.discard(rotation)
            if self.subscribers:
                return
            self.active.clear()
            self.residency.restore(copy_back=self.treatment == "stay" and not undo, to_origin=undo)
            with _LOCK:
                if _OWNERS.get(id(self.module)) is self:
                    del _OWNERS[id(self.module)]


def owner_of(module: torch.nn.Module, name: str, treatment: str, context: ResidencyContext) -> ComponentOwner:
    """Return the component's owner: the one that another pipeline has made, or a new one. Nothing is moved.

    Raises:
        OffloadStateError: Another pipeline manages it on another device, with other pinning or in another way; or it manages only
            a part of it.
    """
    with _LOCK:
        owner = _OWNERS.get(id(module))
        if owner is None or owner.module is not module or not owner.subscribers:
            owner = ComponentOwner(module, name, treatment, context)
            _OWNERS[id(module)] = owner
            return owner
    asked = (context.accelerator.device, context.pin_memory, treatment)
    found = (owner.residency.device, owner.pin_memory, owner.treatment)
    if asked != found:
        raise OffloadStateError(
            f"component {name!r} ({type(module).__name__}) is managed for another pipeline as {owner.name!r} with (device, pinning, "
            f"treatment) {tuple(map(str, found))}, and {tuple(map(str, asked))} was asked for; disable the other pipeline first, or "
            "ask for the same"
        )
    return owner
