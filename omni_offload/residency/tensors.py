"""The tensors of a module, grouped by overlapping bytes.

Ties, views of one another and interleaved slices share bytes and so share a group: one host master, one device copy. Tensors
that only share a storage (a flat checkpoint) do not. Strides and the offsets inside a group are kept on both sides.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from omni_offload.errors import OffloadConfigError

__all__ = ["ALIGNMENT", "Entry", "Placement", "Tables", "align", "collect", "group_by_bytes", "view_of"]

#: Bytes that every tensor's group is aligned to: below 16 results change in the last digit (measured: 4 and 8 bytes).
ALIGNMENT = 64


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def align(nbytes: int) -> int:
    """Round a size or offset (bytes) up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@attrs.define(eq=False)
class Entry:
    """One tensor object of a module, and whether its writes can be told from its version counter."""

    tensor: torch.Tensor
    name: str
    counted: bool = attrs.field(kw_only=True)
    training_buffer_of: torch.nn.Module | None = attrs.field(default=None, kw_only=True)

    def always_written(self) -> bool:
        """Whether the tensor counts as written after every use: no counter, or a kernel that does not move it (batch norm)."""
        return not self.counted or (self.training_buffer_of is not None and self.training_buffer_of.training)

    def version(self) -> int:
        """Return the tensor's version; 0 for inference tensors, which have none."""
        return self.tensor._version if self.counted else 0  # noqa: SLF001  (the counter has no public name)


@attrs.frozen(eq=False)
class Placement:
    """Entries that share bytes, and where those bytes are now.

    Attributes:
        entries: The tensors.
        storage: The storage they are views of (they may hold different storage objects on the same memory).
        start: Address of the first byte.
        nbytes: Bytes from there to the end of the last tensor.
        offsets: Per entry, bytes from `start` to its first element.
    """

    entries: tuple[Entry, ...]
    storage: torch.UntypedStorage
    start: int
    nbytes: int
    offsets: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.storage.device

    def raw(self) -> torch.Tensor:
        """Return the bytes as a flat uint8 tensor on the same memory."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return _on_storage(self.storage, torch.uint8, self.start - self.storage.data_ptr(), (self.nbytes,), (1,))


def _on_storage(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset // dtype.itemsize, size, stride)


def view_of(raw: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor shaped and strided as `like`, of its kind (inference or normal), on the bytes of `raw` from `offset`."""
    with torch.inference_mode(mode=like.is_inference()):
        empty = torch.empty(0, dtype=like.dtype, device=raw.device)
        if like.numel() == 0:
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=raw.device)
        at = (raw.storage_offset() + offset) // like.dtype.itemsize
        view = empty.set_(raw.untyped_storage(), at, like.size(), like.stride())
        if like.is_conj():
            view = view.conj()
        return torch._neg_view(view) if like.is_neg() else view  # noqa: SLF001  (the only way to set the bit)


class Tables:
    """A snapshot of the tables (parameters, buffers, submodules, tensor attributes) of some modules, to see changes of structure."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._tables: list[tuple[dict[str, Any], list[int]]] = []
        self._attributes: list[tuple[dict[str, Any], str, int]] = []
        for module in modules:
            state = module.__dict__
            for table in (state["_parameters"], state["_buffers"], state["_modules"]):
                self._tables.append((table, [*map(id, table.values())]))
            self._attributes.extend((state, name, id(value)) for name, value in _tensor_attributes(module))
        self._states = [module.__dict__ for module in modules]
        self._attribute_count = len(self._attributes)

    def changed(self) -> bool:
        """Whether an object was put into, taken out of or replaced in a table since the snapshot."""
        for table, ids in self._tables:
            if [*map(id, table.values())] != ids:
                return True
        return any(id(state.get(name)) != known for state, name, known in self._attributes)

    def grown(self) -> bool:
        """Whether a module has a tensor attribute that it had not at the snapshot (slower than `changed`: reads every attribute)."""
        count = sum(isinstance(value, torch.Tensor) for state in self._states for value in state.values())
        return count != self._attribute_count


def _tensor_attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor):
            yield name, value


def collect(modules: Mapping[str, torch.nn.Module]) -> tuple[list[Entry], Tables]:
    """Return every distinct tensor of some modules, and a snapshot of their tables.

    Args:
        modules: The modules by the name that messages use.

    Raises:
        OffloadConfigError: A tensor that cannot be moved as bytes (meta, sparse, quantised by a wrapper subclass), all by name.
    """
    entries: dict[int, Entry] = {}
    walked: dict[int, torch.nn.Module] = {}
    problems: list[str] = []
    for root, top in modules.items():
        for path, module in top.named_modules():
            if id(module) in walked:
                continue
            walked[id(module)] = module
            prefix = f"{root}.{path}" if path else root
            for name, tensor, is_buffer in _tensors(module):
                full = f"{prefix}.{name}"
                if id(tensor) in entries:
                    continue
                if problem := _unmovable(tensor):
                    problems.append(f"{full} ({type(tensor).__name__}): {problem}")
                counted = not tensor.is_inference()
                owner = module if is_buffer else None
                entries[id(tensor)] = Entry(tensor, full, counted=counted, training_buffer_of=owner)
    if problems:
        raise OffloadConfigError("these tensors cannot be offloaded: " + "; ".join(problems))
    return list(entries.values()), Tables(list(walked.values()))


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for table, is_buffer in ((module.__dict__["_parameters"], False), (module.__dict__["_buffers"], True)):
        for name, tensor in table.items():
            if tensor is not None:
                yield name, tensor, is_buffer
    for name, tensor in _tensor_attributes(module):
        yield name, tensor, True


def _unmovable(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "meta":
        return "it is on the meta device and has no values; load the weights first"
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialised yet; run its module once"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"its layout {tensor.layout} is not a strided one; densify it or leave its component unmanaged"
    if type(tensor) not in _PLAIN and _has_inner_tensors(tensor):
        return "its values lie in inner tensors; leave its component unmanaged, or dequantise it"
    return None


def _has_inner_tensors(value: object) -> bool:
    return bool(is_traceable_wrapper_subclass(value))


def group_by_bytes(entries: Iterable[Entry]) -> list[Placement]:
    """Group tensors by overlapping bytes; the order is that of the first entry of each group."""
    entries = list(entries)
    order = {id(entry): index for index, entry in enumerate(entries)}
    spans: list[tuple[int, int, Entry]] = []
    placements = []
    for entry in entries:
        if entry.tensor.numel() == 0:
            placements.append(Placement((entry,), entry.tensor.untyped_storage(), 0, 0, (0,)))
        else:
            spans.append((*_span(entry.tensor), entry))
    spans.sort(key=lambda span: (str(span[2].tensor.device), span[0], span[1]))
    run: list[tuple[int, int, Entry]] = []
    end = -1
    for span in spans:
        if run and (span[0] >= end or run[0][2].tensor.device != span[2].tensor.device):
            placements.append(_placement(run))
            run = []
            end = -1
        run.append(span)
        end = max(end, span[1])
    if run:
        placements.append(_placement(run))
    placements.sort(key=lambda placement: min(order[id(entry)] for entry in placement.entries))
    return placements


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    first = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(first), int(first + (reach + 1) * tensor.itemsize)


def _placement(run: list[tuple[int, int, Entry]]) -> Placement:
    entries = tuple(entry for _, _, entry in run)
    start, end = run[0][0], max(last for _, last, _ in run)
    storage = next((s for s in (e.tensor.untyped_storage() for e in entries) if _covers(s, start, end)), None)
    if storage is None:
        names = ", ".join(entry.name for entry in entries)
        raise OffloadConfigError(f"{names} overlap through storages of which none holds all of them; clone one of them")
    itemsizes = {entry.tensor.itemsize for entry in entries}
    if len(itemsizes) > 1:  # so that every tensor's offset is a whole number of its elements
        start -= (start - storage.data_ptr()) % math.lcm(*itemsizes)
    return Placement(entries, storage, start, end - start, tuple(first - start for first, _, _ in run))


def _covers(storage: torch.UntypedStorage, start: int, end: int) -> bool:
    return storage.data_ptr() <= start and end <= storage.data_ptr() + storage.nbytes()
