"""What may not be done with modules while this rank holds a part of their weights only: it would be done with nothing, silently."""

from collections.abc import Iterable
from typing import Any

import torch

from omni_offload.errors import OffloadStateError
from omni_offload.wrappers import MethodWrapper

__all__ = ["Guard"]

#: What reads, writes, casts or copies the weights of one module, from within whatever is done with the whole component.
_OF_MODULES = ("state_dict", "_load_from_state_dict", "_apply", "__getstate__")
#: What begins with something else, such as a folder or other modules, before it comes to those.
_OF_COMPONENTS = ("save_pretrained", "_apply")


class Guard:
    """Refuses `state_dict`, `save_pretrained`, `load_state_dict`, `deepcopy`, pickling and casts of a component, by its name.

    Args:
        name: The component.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._wrappers: list[MethodWrapper] = []

    def install(self, component: torch.nn.Module, holding: Iterable[torch.nn.Module]) -> None:
        """Stand around the methods of a component and of the modules in it that hold such weights. Idempotent."""
        if self._wrappers:
            return
        for module in holding:
            for method in _OF_MODULES:
                self._wrap(module, method)
        for method in _OF_COMPONENTS:
            if callable(getattr(component, method, None)) and not isinstance(component.__dict__.get(method), MethodWrapper):
                self._wrap(component, method)

    def _wrap(self, module: torch.nn.Module, method: str) -> None:
        wrapper = MethodWrapper(self._refuse, module, method)
        self._wrappers.append(wrapper)  # first, so that an interrupt is undone
        module.__dict__[method] = wrapper

    def remove(self) -> None:
        """Let everything be done again. Idempotent."""
        for wrapper in self._wrappers[::-1]:
            wrapper.retire()
        self._wrappers.clear()

    def _refuse(self, module: torch.nn.Module, method: str, *_: Any) -> Any:
        raise OffloadStateError(
            f"{method} was called on {type(module).__name__} of component {self._name!r}, of whose blocks this rank holds a part only; "
            "call disable_omni_offload() on all ranks first"
        )
