"""Which tensors of a component travel with which block; all the others are the rest's."""

from collections.abc import Collection, Iterable, Sequence

import torch

from omni_offload.discovery import modules_of, modules_outside
from omni_offload.residency.mapped import Checkpoint
from omni_offload.residency.tables import leaves_in
from omni_offload.residency.tensors import ALIGNMENT, Entry, align, group_by_bytes

__all__ = ["Partition"]

#: Buffers up to this size (bytes) stay with the rest: they are often written, and as copies of their own they cost more than they free.
_SMALL_BUFFER = 1 << 20


class Partition:
    """The home of every tensor of a component: a streamed block, or the rest.

    A block's are the tensors that no other block and nothing outside of the blocks has, nor shares bytes with, nor another
    component. Small buffers, resident blocks, and what is declared to stay are the rest's.

    Attributes:
        component: The component.
        blocks: Name and module of every block, in execution order.
        sizes: Device bytes of what belongs to each block, whether it travels or stays; padding included.
        residents: The blocks that stay with the rest.
        changes: How many updates found homes other than before.
        checkpoint: The files that the weights may stand in; None: each has memory of its own.

    Args:
        component: As the attribute.
        blocks: As the attribute; no module is in two of them.
        staying: Modules inside of blocks that stay with the rest.
        multiple: What the sizes are rounded up to (bytes).
        checkpoint: As the attribute.
    """

    def __init__(
        self,
        component: torch.nn.Module,
        blocks: Sequence[tuple[str, torch.nn.Module]],
        staying: Iterable[torch.nn.Module] = (),
        *,
        multiple: int = ALIGNMENT,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.component = component
        self.blocks = tuple(blocks)
        self._staying = tuple(staying)
        self._multiple = multiple
        self.checkpoint = checkpoint
        self._away: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self.sizes = [0] * len(self.blocks)
        self.residents: frozenset[int] = frozenset()
        self.changes = 0
        self._homes: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []

    def keep(self, residents: Collection[int]) -> None:
        """Say which blocks are resident, from the next `update` on."""
        self.residents = frozenset(residents)

    def send_away(self, index: int, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the bytes of a streamed block are elsewhere: its tensors are empty, and are its own until `take_back`."""
        self._away[index] = self.sizes[index], [*tensors]

    def take_back(self, index: int) -> None:
        """Note that the tensors of a block have their bytes again. Idempotent."""
        self._away.pop(index, None)

    def update(self, entries: Sequence[Entry], others: Iterable[Entry] = ()) -> None:
        """Find every tensor's home.

        Args:
            entries: All tensors of the component.
            others: Those of other components.
        """
        away = {id(tensor): index for index, (_, tensors) in self._away.items() for tensor in tensors}
        having = self._having()
        foreign = {id(entry.tensor): entry for entry in others}
        homes = away.copy()
        sizes = [0] * len(self.blocks)
        own = {id(entry.tensor): entry for entry in entries if id(entry.tensor) not in away}
        for placement in group_by_bytes((foreign | own).values(), touching=own.keys()):
            found = {home for entry in placement.entries for home in having.get(id(entry.tensor), ())}
            if any(id(entry.tensor) in foreign for entry in placement.entries):
                continue
            small = placement.nbytes <= _SMALL_BUFFER and all(entry.buffer_of is not None for entry in placement.entries)
            home = found.pop() if len(found) == 1 else -1
            if home >= 0 and not small:
                sizes[home] += align(placement.nbytes)
                if home not in self.residents:
                    homes.update((id(entry.tensor), home) for entry in placement.entries)
        rounded = [-(-size // self._multiple) * self._multiple for size in sizes]
        self.changes += homes != self._homes
        self._homes, self.sizes = homes, [self._away[index][0] if index in self._away else size for index, size in enumerate(rounded)]
        self._tensors = [entry.tensor for entry in entries]  # alive, so that no other takes the place of one

    def _having(self) -> dict[int, set[int]]:
        """Return, by the tensor's id, which blocks have it; -1 stands for what lies outside of blocks, or is to stay."""
        within: dict[int, int] = {}
        for index, (_, block) in enumerate(self.blocks):
            within.update((id(module), -1 if id(module) in within else index) for module in modules_of(block))
        staying = [module for part in self._staying for module in modules_of(part)]
        staying += modules_outside(self.component, (block for _, block in self.blocks))
        within.update((id(module), -1) for module in staying)
        having: dict[int, set[int]] = {}
        for module in modules_of(self.component):
            for tensor in leaves_in(module):
                having.setdefault(id(tensor), set()).add(within.get(id(module), -1))
        return having

    def of_block(self, index: int, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries that travel with a block."""
        return [entry for entry in entries if self._homes.get(id(entry.tensor)) == index]

    def of_rest(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries that are the rest's."""
        return [entry for entry in entries if id(entry.tensor) not in self._homes]
