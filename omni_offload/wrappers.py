"""What hooks put into a module's `__dict__`: a callable in place of a method, and one that leaves it out of copies."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from omni_offload.errors import OffloadStateError

__all__ = ["LeftOutOfCopies", "MethodWrapper", "StateWithoutHooks"]

_MISSING = object()
_GETSTATE = "__getstate__"


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method within the hooks, or, once retired, alone."""
        module = self._module()
        if module is None:
            raise OffloadStateError(f"{self.method!r} was called on a module that no longer exists")
        original = _own_method(module, self.method) if self._previous is _MISSING else self._previous  # another library's callable
        if self._run is None:
            return original(*args, **kwargs)
        return self._run(module, self.method, original, args, kwargs)

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
    found: Any = inspect.getattr_static(type(module), method, _MISSING)
    if found is _MISSING:  # a submodule, or what the class hands on to another object
        found = type(module).__getattr__(module, method)
    elif hasattr(type(found), "__get__"):
        found = found.__get__(module, type(module))
    return found  # type: ignore[no-any-return]  # whatever the class says


def _call_own_method(module: torch.nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    return _own_method(module, method)(*args, **kwargs)


def _same(value: Any) -> Any:
    return value
