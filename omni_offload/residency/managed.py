"""The tensors that a residency manages, how they are grouped, and what is known of them."""

import logging
import threading
from collections.abc import Iterable, Iterator

import torch

from omni_offload.accelerator import Accelerator, resolve_device
from omni_offload.residency.context import LATE_PIN_BYTES, ResidencyContext
from omni_offload.residency.counters import Counters
from omni_offload.residency.device import buffers_of
from omni_offload.residency.group import Group
from omni_offload.residency.host import ByteMeter
from omni_offload.residency.mapped import Checkpoint
from omni_offload.residency.tables import collect
from omni_offload.residency.tensors import Entry, Placements, align, group_by_bytes

__all__ = ["ManagedTensors", "unwatched"]

logger = logging.getLogger(__name__)

#: Entered around all work on tensors: subclasses and modes must not see it, and a default device must not move it.
unwatched = torch._C.DisableTorchFunction  # noqa: SLF001  (it has no public name)


class ManagedTensors:
    """The tensors of some modules: which there are, the groups they form, the host masters of these.

    Args:
        module: A module, or several that move together.
        device: The device; a missing index means the current one.
        pin_memory: Whether the host masters are pinned.
        name: How messages call it.
        context: What it shares with others of its owner.
    """

    def __init__(
        self,
        module: torch.nn.Module | Iterable[torch.nn.Module],
        device: torch.device | str,
        *,
        pin_memory: bool = True,
        name: str = "",
        context: ResidencyContext | None = None,
    ) -> None:
        modules = [module] if isinstance(module, torch.nn.Module) else list(module)
        self.name = name or "+".join(dict.fromkeys(type(m).__name__ for m in modules))
        self._modules = {self.name if len(modules) == 1 else f"{self.name}[{i}]": m for i, m in enumerate(modules)}
        self._accelerator = Accelerator.of(resolve_device(device))
        self._context = context or ResidencyContext(self._accelerator, pin_memory)
        self._owns_context = context is None
        self.counters = Counters()
        self._lock = threading.RLock()
        self._groups: list[Group] | None = None
        self._begun = False
        self._streams: dict[int, torch.Stream] = {}
        self._collect()
        self._measure()

    # ---- facts -----------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that weights are loaded to, with its index."""
        return self._accelerator.device

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The modules that move together."""
        return (*self._modules.values(),)

    @property
    def loaded(self) -> bool:
        """Whether the module's tensors are bound to their device copies."""
        return bool(self._groups) and all(self in group.bound and not group.unsure for group in self._groups or ())

    @property
    def fetched(self) -> bool:
        """Whether a whole device copy is held, bound or not."""
        return bool(self._groups) and all(self in group.holders and group.placed for group in self._groups or ())

    @property
    def in_flight(self) -> bool:
        """Whether a copy to the device has not landed yet; the host does not block."""
        buffers = {group.copy.buffer for group in self._groups or () if group.copy is not None}
        return any(buffer.ready is not None and not buffer.ready.query() for buffer in buffers)

    @property
    def host_bytes(self) -> int:
        """Bytes of the distinct weights and buffers, without padding."""
        return sum(self._sizes)

    @property
    def padded_bytes(self) -> int:
        """Device bytes that loading takes, with every group rounded up to the alignment."""
        return self._padded

    @property
    def own_padded_bytes(self) -> int:
        """Device bytes that loading takes, without what others may have in common with it."""
        return self._padded

    @property
    def master_bytes(self) -> int:
        """Host bytes that the masters take, with every group rounded up to the alignment."""
        return self._padded

    @property
    def device_bytes(self) -> int:
        """Device bytes held now: of the copies, with padding, and of what lay beside them and is gone."""
        return self.own_device_bytes

    @property
    def own_device_bytes(self) -> int:
        """Device bytes held now, without what others may have in common with it."""
        held = (group.copy for group in self._groups or () if self in group.holders and group.placed)
        return sum(buffer.nbytes for buffer in buffers_of(held))

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the masters that are pinned."""
        return sum(group.nbytes for group in self._groups or () if group.master is not None and group.master.pinned)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the masters that lie in mapped files."""
        return sum(group.nbytes for group in self._groups or () if group.master is not None and group.master.mapped)

    def unmapped(self) -> Iterator[tuple[str, str]]:
        """Yield what does not lie in a mapped file though there is one for the component: the first tensor's name, and why."""
        return ((group.entries[0].name, group.unmapped) for group in self._groups or () if group.unmapped)

    @property
    def unlocked(self) -> str:
        """Why the pages of mapped files are not locked, though they were to be; empty where they are."""
        return self._context.host.unlocked

    @property
    def overlaps(self) -> bool:
        """Whether copies from the masters leave the host free: they are pinned, up to a little that came late."""
        return self.host_bytes - self.pinned_bytes < LATE_PIN_BYTES and bool(self.pinned_bytes or not self.host_bytes)

    @property
    def shareable(self) -> bool:
        """Whether two pipelines may use it."""
        return True

    @property
    def pins(self) -> bool:
        """Whether pinned memory was asked for."""
        return self._context.pin_memory

    @property
    def meter(self) -> ByteMeter:
        """The meter of the owner's device bytes."""
        return self._context.meter

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the object of every managed tensor; of those with inner tensors, of these."""
        return ((entry.name, entry.tensor) for entry in self._entries)

    def wrappers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the object of every tensor that has inner tensors."""
        return ((wrapper.name, wrapper.tensor) for wrapper in self._tables.wrappers)

    # ---- preparation -------------------------------------------------------------------------------------------------------

    def prepare(self, *, keep_origin: bool = False) -> None:
        """Make the host masters: the original memory, or a pinned arena. Weights found on the device are moved to the host once.

        Args:
            keep_origin: Keep the device memory that weights were found in, for an undo, until `commit`.

        Raises:
            RuntimeError: The device refused to pin memory; the weights are whole, and it may be tried again.
        """
        self._prepare(keep_origin=keep_origin)

    def _prepare(self, *, keep_origin: bool, placements: Placements | None = None) -> None:
        with self._lock, unwatched():
            if self._groups is None:
                if self._outdated_entries():
                    self._collect()
                self._context.own(self._entries, self.name)
                self._begun = True
                checkpoint = self._checkpoint
                groups = self._context.groups_of(self._entries, keep_origin=keep_origin, checkpoint=checkpoint, placements=placements)
                self._set_groups(groups)
                self._tables.derived.put_back(keep_origin=keep_origin)
                self._follow()

    def commit(self) -> None:
        """Let go of what an undo would need. From here on the weights are on the host, or on the device where they are bound."""
        self._tables.derived.commit()
        for group in self._groups or ():
            group.origin = None

    @property
    def _checkpoint(self) -> Checkpoint | None:
        """The files that the weights may stand in; None: each is to have memory of its own."""
        return None

    def _collect(self) -> None:
        entries, tables = collect(self._modules)
        self._entries = self._context.claim(self._select(entries), self.name)
        self._tables = tables

    def _outdated_entries(self) -> bool:
        """Whether the tensors may be others than when they were collected, or are claimed no longer."""
        return self._tables.changed() or self._tables.grown() or not self._context.manages(self._entries)

    def _select(self, entries: list[Entry]) -> list[Entry]:
        """Return those tensors of the modules that are managed here: all."""
        return entries

    def _measure(self) -> None:
        with unwatched():
            self._set_sizes(placement.nbytes for placement in group_by_bytes(self._entries))

    def _set_sizes(self, sizes: Iterable[int]) -> None:
        self._sizes = [*sizes]
        self._padded = sum(map(align, self._sizes))

    def _set_groups(self, groups: list[Group]) -> None:
        for group in groups:
            group.add_user(self)
            self.counters.bytes_out += group.found_bytes
            group.found_bytes = 0
        kept = {*groups}
        for group in self._groups or ():
            if group not in kept:
                group.users.discard(self)
                group.drop(self)
        self._groups = groups
        self._set_sizes(group.nbytes for group in groups)

    def _follow(self) -> None:
        """Let every tensor with inner tensors be where these are bound, and none that is computed outlive its use. Idempotent."""
        for wrapper in self._tables.wrappers:
            wrapper.follow()
        if self._begun and self._tables.derived and not any(self in group.bound for group in self._groups or ()):
            self._tables.derived.put_back()

    # ---- change ------------------------------------------------------------------------------------------------------------

    def validate(self, *, thorough: bool = False) -> bool:
        """Regroup if a tensor was added, removed, replaced or moved to other memory since the last look.

        Args:
            thorough: Also look for new tensor attributes, in every attribute of every module.

        Returns:
            Whether anything changed.
        """
        with self._lock, unwatched():
            groups = self._groups
            if groups is None or any(self in group.bound for group in groups):
                return False
            changed = self._tables.changed() or self._moved()
            if changed or (thorough and self._tables.grown()):
                self._regroup()
                return True
            return False

    def _moved(self) -> bool:
        """Whether a tensor that is not bound to a device copy is in other memory than its master."""
        return not all(group.bound or group.intact() for group in self._groups or ())

    def _settled(self) -> bool:
        """Whether every tensor is in a group, bound to its master, and none was added, removed or replaced since the last look."""
        groups = self._groups or ()
        grouped = {id(tensor) for group in groups for tensor in group.tensors}
        whole = all(group.intact() and not group.unsure for group in groups) and all(id(entry.tensor) in grouped for entry in self._entries)
        return whole and not self._outdated_entries()

    def outdated(self) -> bool:
        """Whether a tensor was added, removed, replaced or moved since the weights were bound (for modules that stay loaded)."""
        with self._lock, unwatched():
            return self._tables.changed() or self._tables.grown() or not all(group.as_bound() for group in self._groups or ())

    def forget_copies(self) -> None:
        """Count every device copy as stale: the next activation reads its master again."""
        with self._lock:
            for group in self._groups or ():
                group.forget()

    def _regroup(self, *, pin_from: int | None = LATE_PIN_BYTES, placements: Placements | None = None) -> None:
        """Group the tensors as they are now. A failure changes nothing that the next look would not find."""
        entries, tables = collect(self._modules)
        entries = self._context.claim(self._select(entries), self.name)
        self._context.own(entries, self.name)
        kept = set(entries)
        own = (group for group in self._groups or () if group.users <= {self})
        leaving = {id(entry.tensor) for group in own for entry in group.entries if entry not in kept}
        groups = self._context.groups_of(entries, pin_from=pin_from, leaving=leaving, checkpoint=self._checkpoint, placements=placements)
        self._set_groups(groups)
        self._context.release(entry for entry in self._entries if entry not in kept)
        self._entries, self._tables = entries, tables
        self._follow()
        logger.debug("%s: regrouped, %d groups", self.name, len(self._groups or ()))
