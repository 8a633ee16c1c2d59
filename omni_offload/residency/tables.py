"""Which tensors a module has, which of them can be moved as bytes, and whether its tables changed since the last look."""

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from omni_offload.discovery import left_to_fsdp, look_for_fsdp, named_modules_of
from omni_offload.errors import OffloadConfigError, listed
from omni_offload.residency.derived import DerivedTensors, derived_names
from omni_offload.residency.subclasses import Wrapper, leaves_of, wrapper_problem
from omni_offload.residency.tensors import Entry, span_of

__all__ = ["Tables", "collect", "leaves_in"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TABLES = ("_parameters", "_buffers", "_modules")
_VALUES_OF = operator.methodcaller("values")
#: Types of what stands in most modules.
_USUAL = {bool, int, float, str, tuple, list, dict, set, type(None), OrderedDict}


class Tables:
    """A snapshot of the tables (parameters, buffers, submodules, tensor attributes) of some modules, to see changes of structure.

    What stands where FSDP2 has taken a parameter is not looked at: it puts whole ones there, and takes them out, as it runs.

    What stood in them is kept alive, so that a successor cannot be taken for it.

    Attributes:
        wrappers: The tensors in them that have inner tensors.
        derived: The tensors that they compute from their weights, which are not looked at.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], wrappers: Sequence[Wrapper] = ()) -> None:
        self.wrappers = wrappers
        modules = [*modules]
        self._states = [module.__dict__ for module in modules]
        self._left = [(index, owned) for index, owned in enumerate(map(left_to_fsdp, modules)) if owned]
        self.derived = DerivedTensors(self._states)
        tables = self._read_tables()
        self._lengths = [*map(len, tables)]
        self._objects = [*itertools.chain.from_iterable(map(dict.values, tables))]
        self._attributes = [(state, name, value) for state in self._states for name, value in _tensor_attributes(state)]

    def changed(self) -> bool:
        """Whether an object was put into, taken out of or replaced in a table since the snapshot."""
        tables = self._read_tables()
        if self._lengths != [*map(len, tables)]:
            return True
        if not all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, tables)), self._objects)):
            return True
        if any(state.get(name) is not known for state, name, known in self._attributes):
            return True
        return any(wrapper.changed() for wrapper in self.wrappers)

    def _read_tables(self) -> list[dict[str, Any]]:
        tables = [state[name] for state in self._states for name in _TABLES]
        for index, owned in self._left:
            at = index * len(_TABLES)  # the parameters, which are the first of each module's
            tables[at] = {name: value for name, value in tables[at].items() if name not in owned}
        return tables

    def grown(self) -> bool:
        """Whether a module has a tensor attribute that it had not at the snapshot (slower than `changed`: reads every attribute)."""
        states = self._states if _any_tensor(itertools.chain.from_iterable(map(_VALUES_OF, self._states))) else ()
        if sum(len(_tensor_attributes(state)) for state in states) != len(self._attributes):
            return True
        return any(wrapper.grown() for wrapper in self.wrappers)


def _any_tensor(values: Iterable[Any]) -> bool:
    """Whether there is a tensor among some values: by their types, of which there are few, at a third of the time."""
    kinds = {*map(type, values)} - _USUAL
    return bool(kinds) and any(issubclass(kind, torch.Tensor) for kind in kinds)


def _tensor_attributes(state: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    if not _any_tensor(state.values()):
        return []
    derived = derived_names(state)
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor) and name not in derived]


def collect(modules: Mapping[str, torch.nn.Module]) -> tuple[list[Entry], Tables]:
    """Return every distinct tensor of some modules (of those with inner tensors, these), and a snapshot of their tables.

    Parameters that FSDP2 owns are left out.

    Args:
        modules: The modules by the name that messages use.

    Raises:
        OffloadConfigError: A tensor that cannot be moved as bytes (meta, sparse), all by name.
    """
    found = _Found()
    with torch._C.DisableTorchFunction():  # noqa: SLF001  (a subclass must not see it)
        for root, top in modules.items():
            look_for_fsdp(top)
            for path, module in named_modules_of(top):
                found.add(f"{root}.{path}" if path else root, module)
    if found.problems:
        problems = "; ".join(f"{listed(names)}: {problem}" for problem, names in found.problems.items())
        raise OffloadConfigError(f"these tensors cannot be offloaded: {problems}")
    return list(found.entries.values()), Tables(found.modules.values(), list(found.wrappers.values()))


class _Found:
    """What was found in modules so far, each object once, by its id."""

    def __init__(self) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.entries: dict[int, Entry] = {}
        self.wrappers: dict[int, Wrapper] = {}
        self.problems: dict[str, list[str]] = {}

    def add(self, prefix: str, module: torch.nn.Module) -> None:
        """Look at one module, without its children."""
        if id(module) in self.modules:
            return
        if isinstance(module, torch.jit.ScriptModule):
            self._refuse(prefix, module, "TorchScript owns its tensors; leave it unmanaged")
            return
        self.modules[id(module)] = module
        for name, tensor, owner in _tensors(module):
            if id(tensor) not in self.entries and id(tensor) not in self.wrappers:
                self._add_tensor(f"{prefix}.{name}", tensor, owner)

    def _add_tensor(self, name: str, tensor: torch.Tensor, owner: torch.nn.Module | None) -> None:
        leaves, around = leaves_of(name, tensor)
        if problem := wrapper_problem(tensor, around):
            self._refuse(name, tensor, problem)
            return
        self.wrappers.update((id(wrapper.tensor), wrapper) for wrapper in around)
        for path, leaf in leaves:
            if id(leaf) not in self.entries:
                if problem := _unmovable(leaf):
                    self._refuse(path, leaf, problem)
                self.entries[id(leaf)] = Entry.of(leaf, path, buffer_of=owner)

    def _refuse(self, name: str, found: object, problem: str) -> None:
        self.problems.setdefault(problem, []).append(f"{name} ({type(found).__name__})")


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.nn.Module | None]]:
    """Yield name, tensor and, for what the module may write without a version counter, the module."""
    state, owned = module.__dict__, left_to_fsdp(module)
    for table, owner in ((state["_parameters"], None), (state["_buffers"], module)):
        for name, tensor in table.items():
            if tensor is not None and not (owner is None and name in owned):
                yield name, tensor, owner
    for name, tensor in _tensor_attributes(state):
        yield name, tensor, module


def leaves_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors of one module, without its children; in the place of those with inner tensors, these."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001  (as above)
        return [leaf for name, tensor, _ in _tensors(module) for _, leaf in leaves_of(name, tensor)[0]]


def _unmovable(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return "it is on the meta device and has no values; load the weights first"
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialised yet; run its module once"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
        return f"its layout ({kind}) is not a plain strided one; densify it or leave its component unmanaged"
    if type(tensor) not in _PLAIN and not _has_memory(tensor):
        return "its values lie in tensors that it does not name (no __tensor_flatten__); leave its component unmanaged, or dequantise it"
    end = span_of(tensor)[1]
    storage = tensor.untyped_storage()
    if tensor.numel() and end > storage.data_ptr() + storage.nbytes():
        return f"its storage holds {storage.nbytes()} bytes, fewer than its {tensor.numel()} elements span; it was freed or cut short"
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
