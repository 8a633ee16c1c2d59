"""Tensors that a module computes anew before every forward: older weight and spectral normalisation, and pruning.

Such a tensor is a plain attribute, and no weight: what it is computed from is. It is not moved, nor counted; the module makes it
on the device, where its weights are, and when they leave it is put back as it was.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["DerivedTensors", "derived_names"]

_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)


def derived_names(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the attributes that a module's own forward pre-hooks compute.

    Args:
        state: The module's `__dict__`.
    """
    hooks = state["_forward_pre_hooks"]
    if not hooks:
        return frozenset()
    found = [hook for hook in hooks.values() if isinstance(hook, _HOOKS)]
    return frozenset(hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name for hook in found)  # noqa: SLF001  (no public name)


class DerivedTensors:
    """The derived tensors of some modules, and what each was on the host (or on the meta device, where it was never computed).

    Args:
        states: The modules' dictionaries, each once.
    """

    def __init__(self, states: Iterable[dict[str, Any]]) -> None:
        self._places = [(state, name) for state in states for name in derived_names(state)]
        self._at_home: dict[int, torch.Tensor] = {}
        self._origins: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def put_back(self, *, keep_origin: bool = False) -> None:
        """Put the tensors of the host in place of those computed on the device. Idempotent.

        One that was found on the device is copied to the host, once; the host waits for it.

        Args:
            keep_origin: Keep those found on the device, for an undo, until `commit`.
        """
        for index, (state, name) in enumerate(self._places):
            value = state.get(name)
            if not isinstance(value, torch.Tensor):
                continue  # the normalisation was removed
            if not _is_home(value):
                if keep_origin:
                    self._origins.append((state, name, value))
                known = self._at_home.get(index)
                value = state[name] = value.detach().cpu() if known is None else known.detach()
            self._at_home[index] = value

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._places)

    def commit(self) -> None:
        """Let go of what only an undo needs."""
        self._origins = []

    def undo(self) -> None:
        """Put back what was kept for an undo."""
        for state, name, value in self._origins:
            state[name] = value


def _is_home(tensor: torch.Tensor) -> bool:
    return tensor.device.type in {"cpu", "meta"}
