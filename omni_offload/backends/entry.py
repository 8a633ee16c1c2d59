"""The hooks around a component's entry points: bring it to the device, align the inputs, let it go again."""

import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from omni_offload.backends.calls import current_rotation
from omni_offload.backends.rotation import Member, Rotation
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.errors import OffloadStateError
from omni_offload.hooks import HookRegistry, ModelHook

__all__ = ["Activation", "EntryHooks", "align_inputs"]


def align_inputs(value: Any, device: torch.device) -> Any:
    """Return a value with every tensor in it on the device.

    Containers (lists, tuples, dicts) are rebuilt only where a tensor in them has to move, so that a cache that the callee
    fills stays the caller's object. The copy blocks the host where the source is pageable.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if type(value) is dict:
        moved = {key: align_inputs(item, device) for key, item in value.items()}
        return moved if any(moved[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [align_inputs(item, device) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Activation:
    """One use of a component, from entry to exit. It holds the pipeline's lock, so that uses on one pipeline take turns."""

    def __init__(self, rotation: Rotation, member: Member) -> None:
        self.rotation = rotation
        self.member = member
        self.thread = threading.get_ident()

    def enter(self) -> None:
        """Bring the component to the device and bind it there."""
        self.rotation.lock.acquire(self)
        self.rotation.onload(self.member, self)

    def leave(self) -> BaseException | None:
        """End the use. Idempotent; returns the first failure, after every step ran."""
        return run_cleanup_steps(
            [
                (f"end the use of {self.member.name}", lambda: self.rotation.offload_when_done(self.member, self)),
                ("let the next use in", lambda: self.rotation.lock.release(self)),
            ]
        )


class _EntryHook(ModelHook):
    """Around the methods of one module that count as work of one component."""

    def __init__(self, rotation: Rotation, member: Member) -> None:
        self._rotation = rotation
        self._member = member
        self._local = threading.local()

    @property
    def _stack(self) -> list[Activation | None]:
        stack: list[Activation | None] = self._local.__dict__.setdefault("stack", [])
        return stack

    @override
    def pre_forward(
        self, module: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._stack.append(None)
        if self._handled_elsewhere():
            return args, kwargs
        self._refuse_autograd(module, method, (args, kwargs))
        activation = self._stack[-1] = Activation(self._rotation, self._member)
        activation.enter()
        device = self._rotation.accelerator.device
        return align_inputs(args, device), align_inputs(kwargs, device)

    @override
    def post_forward(self, module: torch.nn.Module, method: str, output: Any) -> Any:
        if inspect.isgenerator(output) or inspect.iscoroutine(output):
            raise OffloadStateError(
                f"{self._member.name}: {type(module).__name__}.{method} returned a {type(output).__name__}, which has not done its "
                "work yet; declare the methods that do the work as entry points instead"
            )
        self._leave()
        return output

    @override
    def on_error(self, module: torch.nn.Module, method: str, error: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        stack = self._stack
        if not stack:
            return
        error = stack[-1].leave() if stack[-1] is not None else None
        stack.pop()
        if error is not None:
            raise error

    def _handled_elsewhere(self) -> bool:
        """Whether another pipeline, which shares the component, runs the call that this use belongs to."""
        owner, current = self._member.owner, current_rotation()
        if current is not None:
            return current is not self._rotation and current in owner.subscribers
        me = threading.get_ident()
        return any(a.thread == me and a.rotation is not self._rotation for a in owner.active)

    def _refuse_autograd(self, module: torch.nn.Module, method: str, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        wanting = next((f"its weight {name}" for name, tensor in self._member.owner.residency.tensors() if tensor.requires_grad), None)
        if wanting is None and _any_requires_grad(inputs):
            wanting = "an input"
        if wanting is not None:
            raise OffloadStateError(
                f"{self._member.name}: {type(module).__name__}.{method} was called with grad mode on, and {wanting} requires grad; "
                "autograd would keep device copies that offloading frees. Call it under torch.no_grad() or torch.inference_mode()"
            )


def _any_requires_grad(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(_any_requires_grad, value.values()))
    return isinstance(value, list | tuple) and any(map(_any_requires_grad, value))


class EntryHooks:
    """All hooks of one rotation; they carry a name of their own and are the only ones it removes.

    Args:
        rotation: Whose components are hooked.
        pipeline: The pipeline; only a weak reference is kept.
    """

    def __init__(self, rotation: Rotation, pipeline: object) -> None:
        self._rotation = rotation
        self._pipeline = weakref.ref(pipeline)
        self._name = f"omni_offload.{id(rotation):x}"
        self._hooked: list[torch.nn.Module] = []

    def install(self) -> None:
        """Hook `forward` of every component, and every declared entry point. A failure leaves it to `remove`."""
        pipeline = self._pipeline()
        declared = dict(self._rotation.plan.entry_points)
        for member in self._rotation.members.values():
            names = (member.name, *member.planned.aliases)
            methods = dict.fromkeys(["forward", *(m for name in names for m in declared.get(name, ()))])
            self._hook(member.owner.module, member, tuple(methods))
        for path, methods_of_path in declared.items():
            owner = self._owner_of_path(path)
            if owner is not None:
                self._hook(operator.attrgetter(path)(pipeline), owner, methods_of_path)

    def _owner_of_path(self, path: str) -> Member | None:
        """Return the component that a submodule's path lies in; None for a component's own path, or one that is not managed."""
        for member in self._rotation.members.values():
            for name in (member.name, *member.planned.aliases):
                if path == name:
                    return None
                if path.startswith(name + "."):
                    return member
        return None

    def _hook(self, module: torch.nn.Module, member: Member, methods: tuple[str, ...]) -> None:
        self._hooked.append(module)
        HookRegistry.get_or_create(module).register_hook(self._name, _EntryHook(self._rotation, member), methods)

    def renew(self) -> None:
        """Hook the components as they are now."""
        error = self.remove()
        if error is not None:
            raise error
        self.install()

    def remove(self) -> BaseException | None:
        """Remove every hook. Idempotent; returns the first failure, after every step ran."""
        error = run_cleanup_steps((f"unhook {type(m).__name__}", functools.partial(self._unhook, m)) for m in self._hooked)
        if error is None:
            self._hooked.clear()
        return error

    def _unhook(self, module: torch.nn.Module) -> None:
        HookRegistry.get_or_create(module).remove_hook(self._name)
