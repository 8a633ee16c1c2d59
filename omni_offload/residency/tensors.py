"""The tensors of a module, grouped by overlapping bytes.

Ties, views of one another and interleaved slices share bytes and so share a group: one host master, one device copy. Tensors
that only share a storage (a flat checkpoint) do not. Strides and the offsets inside a group are kept on both sides.

Whoever calls these functions with tensors of a subclass disables torch functions first: a subclass must not see it.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import attrs
import torch

from omni_offload.errors import OffloadConfigError

__all__ = [
    "ALIGNMENT",
    "Entry",
    "Placement",
    "Placements",
    "Shape",
    "Shapes",
    "align",
    "group_by_bytes",
    "is_shaped",
    "shape_of",
    "span_of",
    "type_of",
    "view_of",
]

#: Bytes that every tensor's group is aligned to: below 16 results change in the last digit (measured: 4 and 8 bytes).
ALIGNMENT = 64

#: What tells one binding of a tensor object from another: address, type, size, strides, and what only matters where the last
#: element says so (an empty tensor has no address, a complex one may be conjugated): device and conjugate bit.
Shape = tuple[int, torch.dtype, torch.Size, tuple[int, ...], tuple[torch.device, bool] | None]


def align(nbytes: int) -> int:
    """Round a size or offset (bytes) up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return what tells one binding of a tensor object from another."""
    pointer, dtype = tensor.data_ptr(), tensor.dtype
    special = (tensor.device, tensor.is_conj()) if pointer == 0 or dtype.is_complex else None
    return pointer, dtype, tensor.shape, tensor.stride(), special


def is_shaped(tensor: torch.Tensor, shape: Shape) -> bool:
    """Whether a tensor is bound as `shape_of` said of it (0.3 us)."""
    pointer, dtype, size, stride, special = shape
    if tensor.data_ptr() != pointer or tensor.dtype is not dtype or tensor.shape != size or tensor.stride() != stride:
        return False
    return special is None or special == (tensor.device, tensor.is_conj())


class Shapes:
    """What tells the bindings of many tensors from others: `shape_of` each, looked at in a third of the time.

    Args:
        tensors: What they are bound to.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._strides = [tensor.stride() for tensor in tensors]
        self._sizes = [tensor.shape for tensor in tensors]
        self._types = [tensor.dtype for tensor in tensors]
        self._special = [(index, shape) for index, shape in enumerate(map(shape_of, tensors)) if shape[-1] is not None]

    def are_at(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors are all bound to the same addresses."""
        return [tensor.data_ptr() for tensor in tensors] == self._addresses

    def fit(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors are all bound so."""
        return (
            self.are_at(tensors)
            and [tensor.stride() for tensor in tensors] == self._strides
            and [tensor.shape for tensor in tensors] == self._sizes
            and [tensor.dtype for tensor in tensors] == self._types
            and all(is_shaped(tensors[index], shape) for index, shape in self._special)
        )


@attrs.frozen(eq=False)
class Entry:
    """One tensor object of a module.

    Attributes:
        tensor: The tensor.
        name: How messages call it.
        counters: The tensors whose version counters move when it is written: itself, and for the statistics of a batch norm,
            whose kernel moves none, the number of batches beside them. Empty for inference tensors.
        buffer_of: The module that may write it in training mode in a way that no counter tells.
    """

    tensor: torch.Tensor
    name: str
    counters: tuple[torch.Tensor, ...]
    buffer_of: torch.nn.Module | None = None

    @staticmethod
    def of(tensor: torch.Tensor, name: str, *, buffer_of: torch.nn.Module | None) -> "Entry":
        """Describe a tensor of a module."""
        witness = buffer_of.__dict__["_buffers"].get("num_batches_tracked") if buffer_of is not None else None
        known = (tensor,) if witness is None or witness is tensor else (tensor, witness)
        counters = () if any(one.is_inference() for one in known) else known
        return Entry(tensor, name, counters, buffer_of)

    def always_written(self) -> bool:
        """Whether the tensor counts as written after every use: no counter, or a kernel that does not move it (batch norm)."""
        return not self.counters or (self.buffer_of is not None and self.buffer_of.training)


def type_of(entries: Sequence[Entry]) -> str:
    """Return what groups are sorted by: torch saves no two types that lie in one storage."""
    return str(entries[0].tensor.dtype)


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
        with torch.inference_mode(mode=False):
            raw = torch.empty(0, dtype=torch.uint8, device=self.device)
            return raw.set_(self.storage, self.start - self.storage.data_ptr(), (self.nbytes,), (1,)) if self.nbytes else raw


def view_of(raw: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor shaped and strided as `like`, of its kind (inference or normal), on the bytes of `raw` from `offset`."""
    inference = like.is_inference()
    if inference is not torch.is_inference_mode_enabled():  # to enter the mode that is on takes longer than all of the rest
        with torch.inference_mode(mode=inference):
            return view_of(raw, offset, like)
    if like.numel() == 0:
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=raw.device)
    at = (raw.storage_offset() + offset) // like.dtype.itemsize
    view = torch.empty(0, dtype=like.dtype, device=raw.device).set_(raw.untyped_storage(), at, like.size(), like.stride())
    if like.is_conj():
        view = view.conj()
    return torch._neg_view(view) if like.is_neg() else view  # noqa: SLF001  (the only way to set the bit)


class Placements:
    """Where many tensors are, by one look, for several residencies that group theirs one after another.

    Args:
        placements: What groups the tensors form. Nothing but the one who takes them binds them to other memory meanwhile.
    """

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._left = dict(enumerate(placements))
        self._numbers = {id(entry.tensor): number for number, placement in self._left.items() for entry in placement.entries}

    def take(self, tensors: AbstractSet[int], but: AbstractSet[int] = frozenset()) -> list[Placement] | None:
        """Return those of some tensors, in order, and let go of their memory; None: they have to be looked for.

        Args:
            tensors: Ids of the tensors. One may not be known, or its placement be taken.
            but: Ids of tensors that are not to be in them.
        """
        numbers = sorted({self._numbers.get(key, -1) for key in tensors})
        if any(number not in self._left for number in numbers):
            return None
        found = [self._left.pop(number) for number in numbers]
        return found if all(id(entry.tensor) not in but for placement in found for entry in placement.entries) else None


#: The bytes that one tensor lies in: address of the first, address after the last, the tensor.
_Span = tuple[int, int, Entry]


def group_by_bytes(entries: Iterable[Entry], *, touching: AbstractSet[int] | None = None) -> list[Placement]:
    """Group tensors by overlapping bytes; the order is that of the first entry of each group.

    Args:
        entries: The tensors.
        touching: Ids of tensors: only groups that hold one of them are returned; None: all.

    Raises:
        OffloadConfigError: Tensors overlap in a way that no one storage shows; by name.
    """
    entries = list(entries)
    order = {id(entry): index for index, entry in enumerate(entries)}
    placements = []
    spans: dict[torch.device, list[_Span]] = {}
    for entry in entries:
        if entry.tensor.numel():
            spans.setdefault(entry.tensor.device, []).append((*span_of(entry.tensor), entry))
        elif touching is None or id(entry.tensor) in touching:
            placements.append(Placement((entry,), entry.tensor.untyped_storage(), 0, 0, (0,)))
    runs = itertools.chain.from_iterable(map(_runs, spans.values()))
    placements += [_placement(run) for run in runs if touching is None or any(id(entry.tensor) in touching for _, _, entry in run)]
    placements.sort(key=lambda placement: min([order[id(entry)] for entry in placement.entries]))
    return placements


def _runs(spans: list[_Span]) -> list[list[_Span]]:
    """Return the spans of one device that overlap, also where a group begins lower than its first tensor."""
    spans.sort(key=lambda span: span[:2])
    runs: list[list[_Span]] = []
    ends: list[int] = []
    for span in spans:
        run, end = [span], span[1]
        while runs and ends[-1] > (run[0][0] if len(run) == 1 else _start(run)):
            run, end = runs.pop() + run, max(ends.pop(), end)
        runs.append(run)
        ends.append(end)
    return runs


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    first, itemsize = tensor.data_ptr(), tensor.itemsize
    if tensor.is_contiguous():
        return first, first + tensor.numel() * itemsize
    reach = sum([(size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)])
    return first, first + (reach + 1) * itemsize


def _start(run: Sequence[_Span]) -> int:
    """Return where a group begins: where element sizes differ, low enough that every offset is a whole number of elements."""
    itemsizes = {entry.tensor.itemsize for _, _, entry in run}
    start = run[0][0]
    if len(itemsizes) == 1:
        return start
    return start - (start - run[0][2].tensor.untyped_storage().data_ptr()) % math.lcm(*itemsizes)


def _placement(run: Sequence[_Span]) -> Placement:
    if len(run) == 1:
        ((start, end, entry),) = run
        storage, itemsize = entry.tensor.untyped_storage(), entry.tensor.itemsize
        within = start - storage.data_ptr()
        if within % itemsize == 0 <= within and within + end - start <= storage.nbytes():
            return Placement((entry,), storage, start, end - start, (0,))
    entries = tuple([entry for _, _, entry in run])
    start, end = _start(run) if len(run) > 1 else run[0][0], max([stop for _, stop, _ in run])
    offsets = tuple([first - start for first, _, _ in run])
    for entry in entries:
        storage = entry.tensor.untyped_storage()
        within = start - storage.data_ptr()
        whole = all((within + at) % e.tensor.itemsize == 0 == at % e.tensor.itemsize for e, at in zip(entries, offsets, strict=True))
        if whole and within >= 0 and within + end - start <= storage.nbytes():
            return Placement(entries, storage, start, end - start, offsets)
    names = ", ".join(entry.name for entry in entries)
    raise OffloadConfigError(f"{names} overlap through storages of which none holds all of them at whole elements; clone one of them")
