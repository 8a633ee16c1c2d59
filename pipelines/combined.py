"""Pipelines that run other pipelines over components of their own."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["running_inner"]


class _Inner:
    """Stands before the class of an inner pipeline for the time of a call: it works on the device of the outer one."""

    _works_on: torch.device

    @property
    def _execution_device(self) -> torch.device:
        return self._works_on


def running_inner(function: Callable[..., Any], prefixes: Mapping[str, str]) -> Callable[..., Any]:
    """Return a `__call__` in which the inner pipelines work on the outer one's device, with the components that it has now.

    Upstream makes them in its constructor. By themselves they work where their components are, which is the host between uses, and
    keep a component that was replaced in the outer pipeline. Only the outer pipeline's call is a call.

    Args:
        function: The `__call__` that it stands for, with its signature.
        prefixes: Attribute of each inner pipeline, and what the outer pipeline puts before the names of its components.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for attribute, prefix in prefixes.items():
                inner = getattr(self, attribute)
                _pass_components(self, inner, prefix)
                if self.offload_backend is not None:
                    stack.enter_context(_working_on(inner, self.offload_backend.device))
            return function(self, *args, **kwargs)

    return call


def _pass_components(outer: Any, inner: Any, prefix: str) -> None:
    for name, component in inner.components.items():
        current = getattr(outer, prefix + name)
        if current is not component:
            setattr(inner, name, current)


@contextmanager
def _working_on(inner: Any, device: torch.device) -> Iterator[None]:
    """Let a pipeline work on a device while the body runs; after an exception too it is as it was."""
    cls = type(inner)
    try:
        inner.__class__ = type(cls.__name__, (_Inner, cls), {"_works_on": device})
        yield
    finally:
        inner.__class__ = cls
