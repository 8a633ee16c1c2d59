"""What hooks put into a module's `__dict__`: a callable in place of a method, and one that leaves it out of copies."""

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from omni_offload.compiler import Compiler, call_compiled, left_alone, switch_off, switch_on
from omni_offload.errors import OffloadStateError

__all__ = ["CALLS", "COMPILED", "DISPATCH", "LeftOutOfCopies", "MethodWrapper", "StateWithoutHooks"]

#: What a module's call goes through (it runs the torch hooks of users around `forward`), and what stands for it once the module is
#: compiled.
DISPATCH, COMPILED = "_call_impl", "_compiled_call_impl"
#: What a call of a module goes through before `forward`.
CALLS = frozenset({DISPATCH, COMPILED})

_MISSING = object()
_GETSTATE = "__getstate__"
_ASIDE = threading.Lock()


class LeftOutOfCopies:
    """Base of what stands in a module's `__dict__` for hooks alone."""


class MethodWrapper:
    """Stands in a module's `__dict__` for one method.

    Args:
        run: Called with the module, the method's name, the method itself, and the arguments.
        module: The module; only a weak reference is kept.
        method: The method's name.
    """

    def __init__(self, run: Callable[..., Any], module: torch.nn.Module, method: str) -> None:
        function = getattr(module, method)
        functools.update_wrapper(self, function, updated=())
        self.__dict__.pop("__wrapped__", None)  # a bound method would keep the module alive
        with contextlib.suppress(ValueError):  # some builtins have none
            self.__signature__ = inspect.signature(function)
        self._run: Callable[..., Any] | None = run
        self._module = weakref.ref(module)
        self.method = method
        self._previous: Any = module.__dict__.get(method, _MISSING)
        self._aside: set[object] = set()

    @property
    def __code__(self) -> types.CodeType:
        """Makes a wrapped method one that torch.compile takes."""
        return type(self).__call__.__code__

    @left_alone("omni_offload brings the weights here; compile what streams by its blocks (compile_repeated_blocks), or without fullgraph")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method within the hooks, or, once retired, alone."""
        compiler = switch_off()
        if compiler is None and self.method != COMPILED:
            module, original = self._find()
            return original(*args, **kwargs) if self._run is None else self._run(module, self.method, original, args, kwargs)
        try:
            return self._call_compiled(compiler, args, kwargs)
        finally:
            switch_on(compiler)

    def _find(self) -> tuple[torch.nn.Module, Callable[..., Any]]:
        module = self._module()
        if module is None:
            raise OffloadStateError(f"{self.method!r} was called on a module that no longer exists")
        return module, _own_method(module, self.method) if self._previous is _MISSING else self._previous  # another library's callable

    def _call_compiled(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the method, with the compiler on, within the hooks: those of `forward` where it stands for a call of the module."""
        module, original = self._find()
        if self._run is None:
            return call_compiled(compiler, original, *args, **kwargs)
        method = "forward" if self.method in CALLS else self.method
        return self._run(module, method, functools.partial(self._call_bare, module, compiler, original), args, kwargs)

    def _call_bare(self, module: torch.nn.Module, compiler: Compiler, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the method with the compiler on; a compiled call sees the module without the wrapper of `forward`, and is one graph."""
        forward = module.__dict__.get("forward") if self.method in CALLS else None
        if not isinstance(forward, MethodWrapper):
            return call_compiled(compiler, original, *args, **kwargs)
        use = object()
        try:
            forward.step_aside(use)
            return call_compiled(compiler, original, *args, **kwargs)
        finally:
            forward.come_back(use)

    def stands(self) -> bool:
        """Whether a call of the method runs it: it is where it was put, or aside for a use that goes on."""
        module = self._module()
        return bool(self._aside) or (module is not None and module.__dict__.get(self.method) is self)

    def step_aside(self, use: object) -> None:
        """Take the wrapper out of the module's `__dict__`, until every use that asked for it is over."""
        state = self._find()[0].__dict__
        with _ASIDE:
            self._aside.add(use)
            if state.get(self.method) is self:
                self.put_back(state)

    def come_back(self, use: object) -> None:
        """End a use that asked the wrapper to step aside. Idempotent; what was put in its place meanwhile is left alone."""
        state = self._find()[0].__dict__
        with _ASIDE:
            self._aside.discard(use)
            if not self._aside and self._run is not None and state.get(self.method, _MISSING) is self._previous:
                state[self.method] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as the module's own method, where the wrapper is copied by itself or its module's class copies `__dict__` itself."""
        if self._previous is not _MISSING:
            return _same, (self._previous,)
        module = self._module()
        if module is None:
            raise OffloadStateError(f"{self.method!r} of a module that no longer exists cannot be copied")
        on_class = inspect.getattr_static(type(module), self.method, _MISSING) is not _MISSING
        return (_own_method, (module, self.method)) if on_class else (functools.partial, (_call_own_method, module, self.method))

    def put_back(self, state: dict[str, Any]) -> None:
        """Put what stood in a module's `__dict__` before into that, or into a copy of it."""
        if self._previous is _MISSING:
            del state[self.method]
        else:
            state[self.method] = self._previous

    def retire(self) -> None:
        """Put back what stood there before, if this wrapper still stands there; be inert wherever it was captured."""
        self._run = None
        module = self._module()
        if module is not None and module.__dict__.get(self.method) is self:
            self.put_back(module.__dict__)


class StateWithoutHooks(LeftOutOfCopies):
    """Stands in a module's `__dict__` as `__getstate__`: who copies or pickles the module gets it as it is without hooks.

    A class that copies or pickles itself in a way of its own is left to it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    @classmethod
    def install(cls, module: torch.nn.Module) -> None:
        """Put one into a module, unless something stands there."""
        module.__dict__.setdefault(_GETSTATE, cls(module))

    @classmethod
    def remove(cls, module: torch.nn.Module) -> None:
        """Remove it, if it still stands there."""
        if isinstance(module.__dict__.get(_GETSTATE), cls):
            del module.__dict__[_GETSTATE]

    def __call__(self) -> Any:
        """Return the module's state, as its class makes it, without what stands for hooks."""
        module = self._module()
        if module is None:
            raise OffloadStateError("a module that no longer exists cannot be copied")
        return _without_hooks(_own_method(module, _GETSTATE)())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as the class's own, where the class copies `__dict__` itself."""
        return _own_method, (self._module(), _GETSTATE)


def _without_hooks(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    plain = {name: value for name, value in state.items() if not isinstance(value, LeftOutOfCopies)}
    for name, value in state.items():
        if isinstance(value, MethodWrapper) and value.method == name:
            value.put_back(plain)
    return plain


def _own_method(module: torch.nn.Module, method: str) -> Callable[..., Any]:
    """Return a method as the class has it, bound, past whatever stands in the module's `__dict__`."""
    kind = type(module)
    plain = next((base.__dict__[method] for base in kind.__mro__ if method in base.__dict__), None)
    if type(plain) is types.FunctionType:  # what nearly every method is: this runs around every call
        return types.MethodType(plain, module)
    found: Any = inspect.getattr_static(kind, method, _MISSING)
    if found is _MISSING:  # a submodule, or what the class hands on to another object
        found = type(module).__getattr__(module, method)
    elif hasattr(type(found), "__get__"):
        found = found.__get__(module, type(module))
    return found  # type: ignore[no-any-return]  # whatever the class says


def _call_own_method(module: torch.nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    return _own_method(module, method)(*args, **kwargs)


def _same(value: Any) -> Any:
    return value
