"""What counts as a call on a pipeline, and what happens around one."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from omni_offload.backends import backend_of
from omni_offload.errors import OffloadConfigError
from omni_offload.hooks import generator_kind

__all__ = ["wrap_calls"]

_MARK = "_omni_offload_call"


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
        if function is None or hasattr(function, _MARK):
            continue
        if not inspect.isfunction(function):
            raise OffloadConfigError(f"{cls.__qualname__}.{name} counts as a call but is a {type(function).__name__}, not a plain method")
        if kind := generator_kind(function):
            raise OffloadConfigError(
                f"{cls.__qualname__}.{name} counts as a call but is {kind}: weights would leave the device before its work is done; "
                "give it another name and declare the methods that do the work"
            )
        setattr(cls, name, _wrap(function))


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend = backend_of(self)
        if backend is None or not backend.enabled:
            return function(self, *args, **kwargs)
        token, error = object(), None
        try:
            backend.begin_call(token)
            return function(self, *args, **kwargs)
        except BaseException as caught:
            error = caught
            raise
        finally:
            instead = backend.end_call(token, error=error)
            try:
                if instead is not None:
                    raise instead from error
            finally:
                del error, instead  # a frame that holds its own error keeps device tensors alive

    setattr(call, _MARK, True)
    return call
