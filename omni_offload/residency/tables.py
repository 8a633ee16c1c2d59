"""Which tensors a module has, which of them can be moved as bytes, and whether its tables changed since the last look."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from omni_offload.errors import OffloadConfigError
from omni_offload.residency.tensors import Entry, span_of

__all__ = ["Tables", "collect", "tensors_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TABLES = ("_parameters", "_buffers", "_modules")


class Tables:
    """A snapshot of the tables (parameters, buffers, submodules, tensor attributes) of some modules, to see changes of structure.

    What stood in them is kept alive, so that a successor cannot be taken for it.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._states = [module.__dict__ for module in modules]
        self._tables = [(state, name, (*state[name].values(),)) for state in self._states for name in _TABLES]
        self._attributes = [(state, name, value) for state in self._states for name, value in _tensor_attributes(state)]

    def changed(self) -> bool:
        """Whether an object was put into, taken out of or replaced in a table since the snapshot."""
        for state, name, known in self._tables:
            table = state[name]
            if len(table) != len(known) or not all(map(operator.is_, table.values(), known)):
                return True
        return any(state.get(name) is not known for state, name, known in self._attributes)

    def grown(self) -> bool:
        """Whether a module has a tensor attribute that it had not at the snapshot (slower than `changed`: reads every attribute)."""
        return sum(1 for state in self._states for _ in _tensor_attributes(state)) != len(self._attributes)


def _tensor_attributes(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield name, value


def collect(modules: Mapping[str, torch.nn.Module]) -> tuple[list[Entry], Tables]:
    """Return every distinct tensor of some modules, and a snapshot of their tables.

    Args:
        modules: The modules by the name that messages use.

    Raises:
        OffloadConfigError: A tensor that cannot be moved as bytes (meta, sparse, with inner tensors), all by name.
    """
    entries: dict[int, Entry] = {}
    walked: dict[int, torch.nn.Module] = {}
    problems: list[str] = []
    with torch._C.DisableTorchFunction():  # noqa: SLF001  (a subclass must not see it)
        for root, top in modules.items():
            for path, module in top.named_modules():
                if id(module) in walked:
                    continue
                prefix = f"{root}.{path}" if path else root
                if isinstance(module, torch.jit.ScriptModule):
                    problems.append(f"{prefix} ({type(module).__name__}): TorchScript owns its tensors; leave it unmanaged")
                    continue
                walked[id(module)] = module
                for name, tensor, owner in tensors_of(module):
                    if id(tensor) in entries:
                        continue
                    if problem := _unmovable(tensor):
                        problems.append(f"{prefix}.{name} ({type(tensor).__name__}): {problem}")
                    entries[id(tensor)] = Entry.of(tensor, f"{prefix}.{name}", buffer_of=owner)
    if problems:
        raise OffloadConfigError("these tensors cannot be offloaded: " + "; ".join(problems))
    return list(entries.values()), Tables(list(walked.values()))


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.nn.Module | None]]:
    """Yield name, tensor and, for what the module may write without a version counter, the module."""
    state = module.__dict__
    for table, owner in ((state["_parameters"], None), (state["_buffers"], module)):
        for name, tensor in table.items():
            if tensor is not None:
                yield name, tensor, owner
    for name, tensor in _tensor_attributes(state):
        yield name, tensor, module


def _unmovable(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return "it is on the meta device and has no values; load the weights first"
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialised yet; run its module once"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
        return f"its layout ({kind}) is not a plain strided one; densify it or leave its component unmanaged"
    if type(tensor) not in _PLAIN and (_has_inner_tensors(tensor) or not _has_memory(tensor)):
        return "its values lie in inner tensors; leave its component unmanaged, or dequantise it"
    end = span_of(tensor)[1]
    storage = tensor.untyped_storage()
    if tensor.numel() and end > storage.data_ptr() + storage.nbytes():
        return f"its storage holds {storage.nbytes()} bytes, fewer than its {tensor.numel()} elements span; it was freed or cut short"
    return None


def _has_inner_tensors(value: object) -> bool:
    return bool(is_traceable_wrapper_subclass(value))


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
