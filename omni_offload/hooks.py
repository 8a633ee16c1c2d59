"""Hooks around a module's methods: `forward` and any other that counts as work.

A wrapper is a callable in the module's `__dict__`. It is removed if it is still the one that stands there; where another library
wrapped it in turn it stays captured and is inert. A copied or pickled module is the module without its hooks: it runs its own
code, and a process without this package loads it. Signatures are unchanged.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from omni_offload.errors import OffloadStateError
from omni_offload.wrappers import CALLS, LeftOutOfCopies, MethodWrapper, StateWithoutHooks

__all__ = ["HookRegistry", "ModelHook", "generator_kind"]

_REGISTRY = "_omni_hook_registry"


def generator_kind(function: object) -> str | None:
    """Say what makes a method unusable as an entry point: it returns before its work is done. None where it does its work."""
    function = inspect.unwrap(function) if callable(function) else function
    for kind, test in (
        ("a generator", inspect.isgeneratorfunction),
        ("an async generator", inspect.isasyncgenfunction),
        ("a coroutine", inspect.iscoroutinefunction),
    ):
        if test(function):
            return kind
    return None


class ModelHook:
    """What runs around a hooked method. Every method is optional to override.

    `module` is the hooked module and `method` the name of the method that was called, with `args` and `kwargs`. A hook that was
    entered by `pre_forward` is left by exactly one of `post_forward` and `on_error`.
    """

    # ruff: noqa: ARG002  (the defaults do nothing with what they are given)

    def initialize_hook(self, module: torch.nn.Module) -> None:
        """Called once, before the first method is wrapped."""

    def pre_forward(
        self, module: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before a hooked method; returns the arguments it is called with."""
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, method: str, output: Any) -> Any:
        """Called with what the method returned; returns what the caller gets."""
        return output

    def on_error(self, module: torch.nn.Module, method: str, error: BaseException) -> None:
        """Called instead of `post_forward` where the method, or a hook's own `pre_forward`, raised. The error goes on."""

    def remove_hook(self, module: torch.nn.Module) -> None:
        """Called once, after the last method was unwrapped."""


class HookRegistry(LeftOutOfCopies):
    """The hooks of one module, by name. Make it with `get_or_create`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._hooks: dict[str, tuple[ModelHook, frozenset[str]]] = {}
        self._wrappers: dict[str, MethodWrapper] = {}
        self._captured: weakref.WeakSet[MethodWrapper] = weakref.WeakSet()

    @classmethod
    def get_or_create(cls, module: torch.nn.Module) -> "HookRegistry":
        """Return the module's registry, made where it has none; it leaves the module with its last hook."""
        registry = module.__dict__.get(_REGISTRY)
        if registry is None:
            registry = module.__dict__[_REGISTRY] = cls(module)
        StateWithoutHooks.install(module)
        return registry

    @classmethod
    def find(cls, module: torch.nn.Module) -> "HookRegistry | None":
        """Return the module's registry if it has one."""
        return module.__dict__.get(_REGISTRY)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied module has no hooks."""
        return type(None), ()

    def register_hook(self, name: str, hook: ModelHook, methods: Iterable[str] = ("forward",)) -> None:
        """Run a hook around methods of the module; hooks registered later run inside earlier ones.

        Args:
            name: Its name here; an owner uses a name of its own and removes only that.
            hook: What runs.
            methods: Names of methods that do their work before they return.

        Raises:
            OffloadStateError: The name is taken, or a method is missing, special, a property, a generator or a coroutine. Nothing is
                installed.
        """
        module, names = self._get_module(), tuple(methods)
        if name in self._hooks:
            raise OffloadStateError(f"hook {name!r} is registered on {type(module).__name__} already; remove it first")
        problems = [f"{method!r} {problem}" for method in names if (problem := _unhookable(module, method))]
        if problems:
            raise OffloadStateError(f"hook {name!r} cannot be put around methods of {type(module).__name__}: " + "; ".join(problems))
        self._hooks[name] = (hook, frozenset(names))
        try:
            hook.initialize_hook(module)
            for method in names:
                if method not in self._wrappers:
                    self._wrappers[method] = wrapper = MethodWrapper(self.run, module, method)
                    module.__dict__[method] = wrapper
        except BaseException as error:
            try:
                self.remove_hook(name)
            except BaseException as second:  # noqa: BLE001  (the first error is the one to report)
                error.add_note(f"removing hook {name!r} failed too: {second!r}")
            raise

    def remove_hook(self, name: str) -> None:
        """Remove a hook, the wrappers nobody else needs, and with the last hook the registry. Unknown names do nothing."""
        module = self._module()
        entry = self._hooks.get(name)
        if entry is not None:
            needed = frozenset().union(*(methods for other, (_, methods) in self._hooks.items() if other != name))
            for method in [method for method in self._wrappers if method not in needed]:
                self._wrappers[method].retire()
                del self._wrappers[method]
            for wrapper in [one for one in self._captured if one.method not in needed]:
                wrapper.retire()
        try:
            if entry is not None and module is not None:
                entry[0].remove_hook(module)
        finally:
            self._hooks.pop(name, None)
            if not self._hooks and module is not None and module.__dict__.get(_REGISTRY) is self:
                StateWithoutHooks.remove(module)
                del module.__dict__[_REGISTRY]

    def surrounds(self, method: str) -> bool:
        """Whether a call of a method runs its hooks: not where something was put in the place of the wrapper, or it was taken out."""
        wrapper = self._wrappers.get(method)
        return wrapper is not None and wrapper.stands()

    def mend(self) -> None:
        """Run the hooks around what was put in the place of wrapped methods, too. No hooked method runs now."""
        module = self._get_module()
        for method in [method for method in self._wrappers if not (method in CALLS or self.surrounds(method))]:
            self._captured.add(self._wrappers[method])  # what stands there now may call it; so may another module's method
            wrapper = next((one for one in self._captured if module.__dict__.get(method) is one), None)
            if wrapper is None:
                wrapper = module.__dict__[method] = MethodWrapper(self.run, module, method)
            self._wrappers[method] = wrapper

    def get_hook(self, name: str) -> ModelHook | None:
        """Return the hook of that name, or None."""
        entry = self._hooks.get(name)
        return None if entry is None else entry[0]

    def run(
        self,
        module: torch.nn.Module,
        method: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method within its hooks. A hook that was entered is left, by `post_forward` or else by `on_error`."""
        entered: list[ModelHook] = []
        try:
            for hook, methods in tuple(self._hooks.values()):
                if method in methods:
                    entered.append(hook)
                    args, kwargs = hook.pre_forward(module, method, args, kwargs)
            output = original(*args, **kwargs)
            while entered:
                output = entered[-1].post_forward(module, method, output)
                entered.pop()
        except BaseException as error:
            worst = _leave(entered, module, method, error)
            if worst is not error:
                raise worst from error
            raise
        return output

    def _get_module(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise OffloadStateError("the module of this hook registry no longer exists")
        return module


def _unhookable(module: torch.nn.Module, method: str) -> str | None:
    """Say why a hook around a method would not be run, or would be left too early; None where it can be hooked."""
    function = getattr(module, method, None)
    if not callable(function):
        return "is not there, or is no method"
    if method.startswith("__"):
        return "is looked up on the class, past any wrapper; name the method that it calls"
    if inspect.isdatadescriptor(inspect.getattr_static(type(module), method, None)):
        return "is a property, which no wrapper can stand in for"
    if kind := generator_kind(function):
        return f"is {kind}: it returns before its work is done; name the methods that do the work instead"
    return None


def _leave(entered: list[ModelHook], module: torch.nn.Module, method: str, error: BaseException) -> BaseException:
    """Leave every hook that was entered, the innermost first; one whose `on_error` is cut short is asked once more.

    Returns:
        The error to raise: the first, unless it was an `Exception` and an interrupt came later; the others are its notes.
    """
    tries = 0
    while entered:
        hook = entered[-1]
        try:
            hook.on_error(module, method, error)
            tries = 2
        except BaseException as second:  # noqa: BLE001  (one error is raised, after all hooks were left)
            error = _worse(error, second, f"{type(hook).__name__}.on_error")
            tries += 1
        if tries > 1:
            entered.remove(hook)
            tries = 0
    return error


def _worse(first: BaseException, second: BaseException, where: str) -> BaseException:
    if isinstance(first, Exception) and not isinstance(second, Exception):
        second.add_note(f"it came while {where} handled {first!r}")
        return second
    first.add_note(f"{where} failed too: {second!r}")
    return first
