"""Whose weights lie at an address."""

from collections.abc import Iterable, Iterator

import attrs
import torch

from omni_offload.residency.partition import Partition
from omni_offload.residency.subclasses import leaves_of
from omni_offload.residency.tables import collect
from omni_offload.residency.tensors import Entry, span_of
from omni_offload.testing.audit.parts import Part

__all__ = ["Weight", "Weights"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@attrs.frozen(eq=False)
class Weight:
    """One tensor of one component; tied ones stand for each of their owners.

    Args:
        name: Its full name.
        part: The component.
        block: Path of the block that it travels with; None: it is the rest's.
    """

    name: str
    part: Part
    block: str | None


class Weights:
    """The weights of all components, by the bytes that they lie in.

    Args:
        parts: The components.

    Raises:
        OffloadConfigError: A tensor cannot be managed, such as one without values; the message names every one of its component.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = {part.path: _Bytes(part) for part in parts}
        self._known: dict[tuple[int, int], tuple[Weight, ...]] = {}
        self._storages: frozenset[int] = frozenset()
        self._join()

    def _join(self) -> None:
        self._known.clear()
        self._storages = frozenset(address for held in self._parts.values() for address in held.storages)

    def renew(self, part: Part) -> None:
        """Look at a component's tensors anew, if one has moved: casts and adapters put others in their place."""
        if self._parts[part.path].renew():
            self._join()

    def renew_all(self) -> None:
        """Look at the tensors of all components anew."""
        for held in self._parts.values():
            self.renew(held.part)

    def at(self, tensor: torch.Tensor) -> tuple[Weight, ...]:
        """Return the weights that a tensor shares bytes with, one for each owner; none where it is no weight."""
        if type(tensor) not in _PLAIN:
            with torch._C.DisableTorchFunction():  # noqa: SLF001  (a subclass must not see it)
                inner = [leaf for _, leaf in leaves_of("", tensor)[0] if leaf is not tensor]
            if inner:
                return tuple(weight for leaf in inner for weight in self.at(leaf))
        address = storage_of(tensor)
        if address not in self._storages or not tensor.numel():
            return ()
        span = span_of(tensor)
        found = self._known.get(span)
        if found is None:
            found = self._known[span] = tuple(weight for held in self._parts.values() for weight in held.within(*span))
        return found


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones, and subclasses whose values lie elsewhere
        return 0


class _Bytes:
    """The tensors of one component, their bytes, and the storages that they lie in, which are kept alive."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._entries: list[Entry] = []
        self._addresses: list[int] = []
        self._spans: list[tuple[int, int, Weight]] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.renew()

    def renew(self) -> bool:
        entries, _ = collect({self.part.path: self.part.module})
        addresses = [entry.tensor.data_ptr() for entry in entries]
        if addresses == self._addresses and all(a.tensor is b.tensor for a, b in zip(entries, self._entries, strict=True)):
            return False
        self._entries, self._addresses = entries, addresses
        homes = dict(self._homes(entries))
        self._spans = [
            (*span_of(entry.tensor), Weight(entry.name, self.part, homes.get(id(entry.tensor))))
            for entry in entries
            if entry.tensor.numel()
        ]
        storages = [entry.tensor.untyped_storage() for entry in entries if entry.tensor.numel()]
        self.storages = {storage.data_ptr(): storage for storage in storages}
        return True

    def _homes(self, entries: list[Entry]) -> Iterator[tuple[int, str]]:
        """Yield the id of every tensor that travels with a block, and the block's path."""
        if not self.part.blocks:
            return
        partition = Partition(self.part.module, self.part.blocks, self.part.rest)
        partition.update(entries)
        for index, (path, _) in enumerate(self.part.blocks):
            yield from ((id(entry.tensor), path) for entry in partition.of_block(index, entries))

    def within(self, first: int, end: int) -> Iterator[Weight]:
        yield from (weight for start, stop, weight in self._spans if start < end and first < stop)
