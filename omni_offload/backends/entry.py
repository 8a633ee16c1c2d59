"""The hooks around a component's entry points: bring it to the device, align the inputs, let it go again."""

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from typing_extensions import override

from omni_offload.backends.activation import Activation
from omni_offload.backends.calls import current_rotation
from omni_offload.backends.failures import raise_error
from omni_offload.backends.inputs import align_inputs, tensors_in
from omni_offload.backends.owners import Member
from omni_offload.backends.rotation import Rotation
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.discovery import module_at
from omni_offload.errors import ComponentPathError, OffloadStateError
from omni_offload.hooks import HookRegistry, ModelHook
from omni_offload.wrappers import COMPILED, DISPATCH

__all__ = ["EntryHook", "EntryHooks", "is_use"]


def is_use(module: torch.nn.Module, method: str) -> bool:
    """Whether a method that is entered begins a use: of a call, only where torch hooks of users run in it, or another `forward`."""
    if method != DISPATCH:
        return True
    state, registry = module.__dict__, HookRegistry.find(module)
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or _has_any_global_hook():  # type: ignore[no-untyped-call]  # torch's own
        return True
    return registry is not None and not registry.surrounds("forward")


#: Gives path, module and hook of every block of a component that streams.
BlockHooks = Callable[[Member], Iterable[tuple[str, torch.nn.Module, ModelHook]]]


class EntryHook(ModelHook):
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
        if not is_use(module, method) or self._handled_elsewhere():
            return args, kwargs
        self._refuse_autograd(module, "forward" if method == DISPATCH else method, (args, kwargs))
        device = self._rotation.accelerator.device
        aligned = align_inputs(args, device), align_inputs(kwargs, device)  # before the weights: a copy engine works in order
        activation = self._stack[-1] = Activation(self._rotation, self._member)
        return aligned if activation.enter() else (args, kwargs)

    @override
    def post_forward(self, module: torch.nn.Module, method: str, output: Any) -> Any:
        if inspect.isgenerator(output) or inspect.iscoroutine(output) or inspect.isasyncgen(output):
            raise OffloadStateError(
                f"{self._member.name}: {type(module).__name__}.{method} returned a {type(output).__name__}, which has not done its "
                "work yet; declare the methods that do the work as entry points instead"
            )
        self._leave(None)
        return output

    @override
    def on_error(self, module: torch.nn.Module, method: str, error: BaseException) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        stack = self._stack
        if not stack:
            return
        second = stack[-1].leave(error) if stack[-1] is not None else None
        stack.pop()
        try:
            raise_error(second)
        finally:
            del second  # no cycle with its traceback

    def _handled_elsewhere(self) -> bool:
        """Whether another pipeline, which shares the component, runs the call (or else the use) that this use belongs to."""
        owner, current = self._member.owner, current_rotation()
        if current is not None and current in owner.subscribers:
            return current is not self._rotation
        me = threading.get_ident()
        return any(a.thread == me and a.rotation is not self._rotation for a in tuple(owner.active))

    def _refuse_autograd(self, module: torch.nn.Module, method: str, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        residency = self._member.owner.residency
        weights = itertools.chain(residency.tensors(), residency.wrappers())
        wanting = next((f"its weight {name}" for name, tensor in weights if tensor.requires_grad), None)
        if wanting is None and any(tensor.requires_grad for tensor in tensors_in(inputs)):
            wanting = "an input"
        if wanting is not None:
            raise OffloadStateError(
                f"{self._member.name}: {type(module).__name__}.{method} was called with grad mode on, and {wanting} requires grad; "
                "autograd would keep device copies that offloading frees. Call it under torch.no_grad() or torch.inference_mode()"
            )


class EntryHooks:
    """All hooks of one rotation; they carry names of their own and are the only ones it removes.

    Args:
        rotation: Whose components are hooked.
        pipeline: The pipeline; only a weak reference is kept.
        make_block_hooks: Gives the hooks of a component's blocks, where blocks stream.
    """

    def __init__(self, rotation: Rotation, pipeline: object, make_block_hooks: BlockHooks = lambda _: ()) -> None:
        self._rotation = rotation
        self._make_block_hooks = make_block_hooks
        self._pipeline = weakref.ref(pipeline)
        self._name = f"omni_offload.{id(rotation):x}"
        self._hooked: list[tuple[torch.nn.Module, str]] = []

    def install(self) -> None:
        """Hook `forward` of every component, and every declared entry point; `forward` with the torch hooks that are around it.

        A failure leaves it to `remove`.
        """
        wanted: dict[tuple[int, str], tuple[torch.nn.Module, Member, list[str]]] = {}
        for member in self._rotation.members.values():
            module = member.owner.module
            wanted[id(module), member.name] = (module, member, ["forward"])
        for path, methods in self._rotation.plan.entry_points:
            owner, part = self._member_of(path), self._module(path)
            if owner is not None and part is not None:
                wanted.setdefault((id(part), owner.name), (part, owner, []))[2].extend(methods)
        for module, member, names in wanted.values():
            self._register(module, member.name, EntryHook(self._rotation, member), names)
        for member in self._rotation.members.values():
            for path, block, hook in self._make_block_hooks(member):
                self._register(block, path, hook, ["forward"])

    def _register(self, module: torch.nn.Module, name: str, hook: ModelHook, methods: list[str]) -> None:
        name = f"{self._name}.{name}"
        self._hooked.append((module, name))  # first, so that an interrupt is undone
        dispatch = [DISPATCH] if "forward" in methods else []  # the torch hooks of users belong to the use: they see the weights there
        if dispatch and module.__dict__.get(COMPILED) is not None:
            dispatch.append(COMPILED)
        HookRegistry.get_or_create(module).register_hook(name, hook, tuple(dict.fromkeys([*methods, *dispatch])))

    def _member_of(self, path: str) -> Member | None:
        """Return the component that a path is, or lies in; None for one that is not managed."""
        members = self._rotation.members.values()
        return next((member for member in members for name in member.names if f"{path}.".startswith(f"{name}.")), None)

    def _module(self, path: str) -> torch.nn.Module | None:
        try:
            return module_at(self._pipeline(), path)
        except ComponentPathError:  # a component that was put there since has no such part
            return None

    def renew(self) -> None:
        """Hook the components as they are now."""
        raise_error(self.remove())
        self.install()

    def mend(self) -> None:
        """Hook what was put in the place of hooked methods. Nothing runs now."""
        for module, _ in self._hooked:
            HookRegistry.get_or_create(module).mend()

    def remove(self) -> BaseException | None:
        """Remove every hook. Idempotent; returns the first failure, after every step ran."""
        error = run_cleanup_steps((f"unhook {type(m).__name__}", functools.partial(_unhook, m, name)) for m, name in self._hooked)
        if error is None:
            self._hooked.clear()
        return error


def _unhook(module: torch.nn.Module, name: str) -> None:
    HookRegistry.get_or_create(module).remove_hook(name)
