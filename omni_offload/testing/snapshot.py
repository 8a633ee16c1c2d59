"""Components as they were: their tensors, attributes and hooks, to compare with later."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from omni_offload.testing.observe import same_values, tensors_of

__all__ = ["Snapshot"]

_MISSING = object()


@attrs.frozen
class _Seen:
    """One tensor as it was."""

    tensor: torch.Tensor
    value: torch.Tensor
    facts: dict[str, Any]
    tied: tuple[str, ...]


class Snapshot:
    """Tensors, attributes and hooks of some components as they are now, to compare with later.

    Args:
        components: Components by path.
        pipeline: The pipeline, whose own attributes are compared too; None: they are not.
    """

    def __init__(self, components: Mapping[str, torch.nn.Module], pipeline: Any = None) -> None:
        self._pipeline = pipeline
        self._components = dict(components)
        self._tensors = {path: _see(module) for path, module in components.items()}
        self._attributes = {
            f"{path}.{name}".rstrip("."): (inner, dict(vars(inner)), _hooks(inner))
            for path, module in components.items()
            for name, inner in module.named_modules()
        }
        self._own = dict(vars(pipeline)) if hasattr(pipeline, "__dict__") else {}

    def differences(self, *, attributes: bool = True, device: bool = True) -> list[str]:
        """Return what is not as it was, as sentences; empty where all is.

        Args:
            attributes: Also compare the attributes and hooks of every module, and of the pipeline.
            device: Also compare the devices of tensors.
        """
        found = [line for path, module in self._components.items() for line in self._changed_tensors(path, module, device=device)]
        return [*found, *self._changed_attributes()] if attributes else found

    def lost_objects(self) -> list[str]:
        """Return the names of tensors that are no longer the same Python objects."""
        lost = []
        for path, module in self._components.items():
            now = tensors_of(module)
            lost += [f"{path}.{name}" for name, tensor in self._tensors[path].items() if now.get(name) is not tensor.tensor]
        return lost

    def _changed_tensors(self, path: str, module: torch.nn.Module, *, device: bool) -> Iterator[str]:
        now, before = _see(module, values=False), self._tensors[path]
        for name in before.keys() | now.keys():
            if name not in now or name not in before:
                yield f"{path}.{name} was {'removed' if name not in now else 'added'}"
                continue
            old, new = before[name], now[name]
            if new.tensor is not old.tensor:
                yield f"{path}.{name} is another object"
            for fact, value in old.facts.items():
                if new.facts[fact] != value and (device or fact != "device"):
                    yield f"{path}.{name} has {fact} {new.facts[fact]}, not {value}"
            if new.tied != old.tied:
                yield f"{path}.{name} shares memory with {new.tied or 'nothing'}, not {old.tied or 'nothing'}"
            if new.facts["shape"] == old.facts["shape"] and not same_values([new.tensor], [old.value]):
                yield f"{path}.{name} has other values"

    def _changed_attributes(self) -> Iterator[str]:
        for path, (module, before, hooks) in self._attributes.items():
            yield from (f"{path}.{name} was {how}" for name, how in _changes(module, before, vars(module)))
            if _hooks(module) != hooks:
                yield f"{path} has {_hooks(module)} torch hooks, not {hooks}"
        if self._own:
            changes = _changes(self._pipeline, self._own, vars(self._pipeline))
            yield from (f"attribute {name} of the pipeline was {how}" for name, how in changes)


def _changes(owner: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in before.keys() | now.keys():
        if name in before and name in now and before[name] is now[name]:
            continue
        default = getattr(type(owner), name, _MISSING)
        if before.get(name, default) is not now.get(name, default):
            yield name, "removed" if name not in now else "added" if name not in before else "replaced"


def _see(module: torch.nn.Module, *, values: bool = True) -> dict[str, _Seen]:
    named = tensors_of(module)
    by_memory: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in named.items():
        if tensor.numel():
            by_memory.setdefault((tensor.device, tensor.data_ptr()), []).append(name)
    seen = {}
    for name, tensor in named.items():
        facts = {
            "device": tensor.device,
            "dtype": tensor.dtype,
            "shape": tuple(tensor.shape),
            "strides": tuple(tensor.stride()),
            "requires_grad": tensor.requires_grad,
            "class": type(tensor).__name__,
        }
        others = tuple(sorted(set(by_memory.get((tensor.device, tensor.data_ptr()), ())) - {name}))
        seen[name] = _Seen(tensor, tensor.detach().to("cpu", copy=True) if values else tensor, facts, others)
    return seen


def _hooks(module: torch.nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return sum(len(vars(module).get(table, ())) for table in tables)
