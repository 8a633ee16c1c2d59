"""What counts as a call on a pipeline, and what happens around one."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from omni_offload.backends import OffloadBackend, backend_of
from omni_offload.errors import OffloadConfigError
from omni_offload.hooks import generator_kind

__all__ = ["bound_method", "wrap_calls"]

#: The wrappers made here. A mark on the function would be copied by `functools.wraps` to an override that decorates itself so.
_WRAPPERS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def wrap_calls(cls: type, names: Iterable[str]) -> None:
    """Wrap the methods of a class that count as a call, its own and inherited ones, each once; signatures are kept.

    Args:
        cls: A pipeline class that has just been defined.
        names: The methods; those that the class does not have are left out.

    Raises:
        OffloadConfigError: A method is a generator or a coroutine, which returns before its work is done.
    """
    for name in names:
        function = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
        if function is None or (inspect.isfunction(function) and function in _WRAPPERS):
            continue
        if not inspect.isfunction(function):
            raise OffloadConfigError(f"{cls.__qualname__}.{name} counts as a call but is a {type(function).__name__}, not a plain method")
        if kind := generator_kind(function):
            raise OffloadConfigError(
                f"{cls.__qualname__}.{name} counts as a call but is {kind}: weights would leave the device before its work is done; "
                "give it another name and declare the methods that do the work"
            )
        wrapper = _wrap(function, bound_method(cls, name, function))
        _WRAPPERS.add(wrapper)
        setattr(cls, name, wrapper)


def bound_method(cls: type, name: str, function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Return what binds the method that a wrapper on a class stands for: its own function, else what the next class in line has.

    An inherited method is looked up at each call, so that the wrapper changes nothing in how classes are combined; and past the class
    that stands for this one where it was made anew, as for `__slots__`.
    """
    if name in cls.__dict__:
        return lambda self: functools.partial(function, self)
    return lambda self: getattr(super(cls if isinstance(self, cls) else _made_of(cls, type(self)), self), name)


def _made_of(cls: type, found: type) -> type:
    """Return the class among another one's bases, or itself, that was made of a class: attrs and dataclasses make a new one of it."""
    return next(base for base in found.__mro__ if (base.__module__, base.__qualname__) == (cls.__module__, cls.__qualname__))


def _wrap(function: Callable[..., Any], bind: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        work, backend = bind(self), backend_of(self)
        if backend is None or not backend.enabled:
            return work(*args, **kwargs)
        return _run(backend, work, args, kwargs)

    return call


def _run(backend: OffloadBackend, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the work as a call; whatever ends it, and wherever an interrupt lands, the call is ended."""
    token, error = object(), None
    try:
        try:
            backend.begin_call(token)
            return work(*args, **kwargs)
        except BaseException as caught:
            error = caught
            raise
        finally:
            instead = backend.end_call(token, error=error)
            try:
                if instead is not None:
                    raise instead from error
            finally:
                del instead
    except BaseException as caught:
        backend.end_call(token, error=caught)  # where the first was interrupted; else it does nothing
        raise
    finally:
        del error  # a frame that holds its own error keeps device tensors alive
