"""The residency of a module's weights: fetch, bind, unbind, drop; or simply load, offload, restore."""

import contextvars
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from omni_offload.accelerator import Accelerator, resolve_device
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.group import DeviceBuffer, Group
from omni_offload.residency.host import ByteMeter, master_of
from omni_offload.residency.tensors import align, collect, group_by_bytes
from omni_offload.residency.transfer import transfers

__all__ = ["Counters", "ModuleResidency", "recording"]

logger = logging.getLogger(__name__)

#: Lists that residencies made from here on are added to: how a backend finds those of a pipeline that owns its flow.
recording: contextvars.ContextVar[tuple[list["ModuleResidency"], ...]] = contextvars.ContextVar("recording", default=())


@attrs.define
class Counters:
    """What happened to one residency; bytes are counted as copied, padding included."""

    bytes_in: int = 0
    bytes_out: int = 0
    loads: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    wasted_copies: int = 0


class ModuleResidency:
    """Moves the weights of modules between host and device, as the same tensor objects.

    Nothing is touched before the first `load` (or `prepare`). Every method is idempotent; methods of one object exclude each other.

    Args:
        module: A module, or several that move together.
        device: The device; a missing index means the current one.
        pin_memory: Whether the host masters are pinned, so that copies overlap with work. Pageable masters block the host.
        name: How messages call it.
        context: What it shares with other residencies of its owner.

    Raises:
        OffloadStateError: There is no such device, or another owner manages one of the tensors.
        OffloadConfigError: A tensor that cannot be moved as bytes, by name.
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
        entries, self._tables = collect(self._modules)
        self._entries = self._context.claim(entries, self.name)
        self._sizes = [placement.nbytes for placement in group_by_bytes(self._entries)]
        for listener in recording.get():
            listener.append(self)

    # ---- facts -----------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that weights are loaded to, with its index."""
        return self._accelerator.device

    @property
    def loaded(self) -> bool:
        """Whether the module's tensors are bound to their device copies."""
        return bool(self._groups) and all(self in group.bound for group in self._groups or ())

    @property
    def fetched(self) -> bool:
        """Whether a whole device copy is held, bound or not."""
        return bool(self._groups) and all(self in group.holders and group.copy is not None for group in self._groups or ())

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
        return sum(map(align, self._sizes))

    @property
    def device_bytes(self) -> int:
        """Bytes of the device copies held now, padding included."""
        return sum(align(group.nbytes) for group in self._groups or () if self in group.holders and group.copy is not None)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the masters that are pinned."""
        return sum(group.nbytes for group in self._groups or () if group.master is not None and group.master.pinned)

    @property
    def overlaps(self) -> bool:
        """Whether copies from the masters leave the host free: all of them are pinned."""
        return all(group.master is not None and group.master.pinned for group in self._groups or () if group.nbytes)

    @property
    def pins(self) -> bool:
        """Whether pinned memory was asked for."""
        return self._context.pin_memory

    @property
    def meter(self) -> ByteMeter:
        """The meter of the owner's device bytes."""
        return self._context.meter

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the object of every managed tensor."""
        return ((entry.name, entry.tensor) for entry in self._entries)

    # ---- for pipelines that own their flow ---------------------------------------------------------------------------------

    def load(self) -> None:
        """Copy the weights to the device and bind the tensors there; the current stream waits for the copies, the host does not.

        Raises:
            torch.OutOfMemoryError: As raised; the module is on the host then, as before.
        """
        with self._lock:
            if not self.loaded:
                self.fetch()
                self.bind()

    def offload(self) -> None:
        """Bind the tensors to the host again and free the device; only what was written on the device is copied back."""
        with self._lock:
            self.unbind()
            self.drop()

    def restore(self, *, copy_back: bool = False, to_origin: bool = False) -> None:
        """Offload, unpin and end the management; the weights are whole, on the host. Idempotent, and repairs what an interrupt left.

        Every step runs; the first failure is raised afterwards.

        Args:
            copy_back: Copy every bound device copy back, written or not (for modules that were on the device all the time).
            to_origin: Undo: put weights that were found on the device back to where they were.
        """
        error = run_cleanup_steps(
            [
                (f"unbind {self.name}", lambda: self.unbind(force=True, copy_back=copy_back)),
                (f"free the device copies of {self.name}", self.drop),
                (f"repair the bindings of {self.name}", self._repair),
                (f"take in what changed in {self.name}", lambda: None if to_origin else self._take_in()),
                (f"put {self.name} back", lambda: self._settle(to_origin=to_origin)),
                (f"give up {self.name}", self._disown),
                (f"unpin {self.name}", lambda: self._context.close() if self._owns_context else None),
            ]
        )
        if error is not None:
            raise error

    # ---- preparation -------------------------------------------------------------------------------------------------------

    def prepare(self, *, keep_origin: bool = False) -> None:
        """Make the host masters: the original memory, or a pinned arena. Weights found on the device are moved to the host once.

        Args:
            keep_origin: Keep the device memory that weights were found in, for an undo, until `commit`.
        """
        with self._lock:
            if self._groups is None:
                self._set_groups(self._context.groups_of(self._entries, keep_origin=keep_origin))

    def commit(self) -> None:
        """Let go of what an undo would need. From here on the weights are on the host, or on the device where they are bound."""
        for group in self._groups or ():
            group.origin = None

    def _set_groups(self, groups: list[Group]) -> None:
        old = self._groups or []
        self._groups = groups
        self._sizes = [group.nbytes for group in groups]
        for group in groups:
            group.users.add(self)
            self.counters.bytes_out += group.found_bytes
            group.found_bytes = 0
        for group in old:
            if group not in groups:
                group.users.discard(self)
                group.drop(self)

    # ---- device ------------------------------------------------------------------------------------------------------------

    def fetch(self) -> bool:
        """Queue copies of what the device does not hold as it is on the host; the host does not block (pinned masters).

        Returns:
            Whether anything had to be copied.

        Raises:
            torch.OutOfMemoryError: As raised; the device copies that nothing is bound to are dropped then.
        """
        with self._lock:
            self.prepare()
            self.validate()
            try:
                return self._fetch(self._groups or [])
            except BaseException:
                self.drop()
                raise

    def _fetch(self, groups: Sequence[Group]) -> bool:
        stale = [group for group in groups if group.copy is not None and not group.bound and not group.current()]
        missing = [group for group in groups if group.copy is None]
        for group in groups:
            group.hold(self)
        self._place([group for group in missing if len(group.users) <= 1])
        for group in missing:
            if len(group.users) > 1:
                self._place([group])
        for group in stale:
            if group.copy is not None:
                group.copy.buffer.order_after_uses()
        if missing or stale:
            self._copy([group for group in groups if group in missing or group in stale])
        self.counters.loads += bool(missing)
        self.counters.wasted_copies += bool(stale)
        return bool(missing or stale)

    def _place(self, groups: Sequence[Group]) -> None:
        """Give groups room in one buffer."""
        if not groups:
            return
        buffer = DeviceBuffer(self._accelerator, sum(align(group.nbytes) for group in groups), self._context.meter)
        offset = 0
        for group in groups:
            group.place(buffer, offset)
            offset += align(group.nbytes)

    def _copy(self, groups: Sequence[Group]) -> None:
        for source, target, pinned in transfers(groups):
            self._context.copy(target, source, pinned=pinned)
            self.counters.bytes_in += target.numel()
            logger.debug("%s: %d bytes to %s", self.name, target.numel(), self.device)
        ready = self._accelerator.record_copies()
        for group in groups:
            if group.copy is not None:
                group.copy.buffer.ready = ready
                group.remember()

    def bind(self) -> None:
        """Bind every tensor to its device copy; the current stream waits for the copies. `fetch` comes first."""
        with self._lock:
            groups = self._groups or []
            for event in {group.copy.buffer.ready for group in groups if group.copy is not None}:
                if event is not None:
                    self._accelerator.wait(event)
            for group in groups:
                group.bind(self)

    def unbind(self, *, force: bool = False, copy_back: bool = False) -> None:
        """Bind every tensor to its host master; what was written on the device is copied back first, which blocks the host.

        The device copies stay. The host also waits until the copies that the module ran on have landed, so that masters may be
        edited from here on.

        Args:
            force: Repair: also where an interrupt left the module half bound.
            copy_back: Copy everything back, written or not.
        """
        with self._lock:
            groups = [group for group in self._groups or () if self in group.bound or (force and group.copy is not None)]
            if groups:
                self._note_use(groups)
            for group in groups:
                self.counters.bytes_out += group.unbind(self, force=force, copy_back=copy_back)

    def note_use(self) -> None:
        """Note that the current stream uses the device copies: their memory is not freed before it is done. Nothing blocks."""
        with self._lock:
            groups = [group for group in self._groups or () if group.copy is not None]
            if groups:
                stream, event = self._accelerator.record_compute()
                for buffer in {group.copy.buffer for group in groups if group.copy is not None}:
                    buffer.uses[stream.stream_id] = event

    def _note_use(self, groups: Sequence[Group]) -> None:
        stream, event = self._accelerator.record_compute()
        for buffer in {group.copy.buffer for group in groups if group.copy is not None}:
            buffer.uses[stream.stream_id] = event
            if buffer.ready is not None and not buffer.ready.query():
                buffer.ready.synchronize()

    def drop(self) -> None:
        """Let go of the device copies that are not bound, in the order of the copy stream; the host does not block."""
        with self._lock:
            for group in self._groups or ():
                if self not in group.bound:
                    group.drop(self)

    # ---- change ------------------------------------------------------------------------------------------------------------

    def validate(self, *, thorough: bool = False) -> bool:
        """Regroup if a tensor was added, removed, replaced or moved to other memory since the last look.

        Args:
            thorough: Also look for new tensor attributes, in every attribute of every module.

        Returns:
            Whether anything changed.
        """
        with self._lock:
            groups = self._groups
            if groups is None or any(self in group.bound for group in groups):
                return False
            changed = self._tables.changed() or not all(group.bound or group.intact() for group in groups)
            if changed or (thorough and self._tables.grown()):
                self._regroup()
                return True
            return False

    def outdated(self) -> bool:
        """Whether a tensor was added, removed, replaced or moved since the weights were bound (for modules that stay loaded)."""
        with self._lock:
            return self._tables.changed() or self._tables.grown() or not all(group.as_bound() for group in self._groups or ())

    def forget_copies(self) -> None:
        """Count every device copy as stale: the next activation reads its master again."""
        with self._lock:
            for group in self._groups or ():
                if group.copy is not None:
                    group.copy.fingerprint = None

    def _regroup(self) -> None:
        entries, tables = collect(self._modules)
        former, self._entries = self._entries, self._context.claim(entries, self.name)
        self._tables = tables
        self._set_groups(self._context.groups_of(self._entries, late=True))
        kept = set(self._entries)
        self._context.release(entry for entry in former if entry not in kept)
        logger.debug("%s: regrouped, %d groups", self.name, len(self._groups or ()))

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def _repair(self) -> None:
        for group in self._groups or ():
            if not group.bound:
                group.repair()

    def _take_in(self) -> None:
        self.validate(thorough=True)

    def _settle(self, *, to_origin: bool) -> None:
        for group in self._groups or ():
            if len(group.users) > 1 or group.master is None:
                continue
            if to_origin:
                group.back_to_origin()
            elif group.master.region is not None and group.master.region.stays_pinned:
                placement = group_by_bytes(group.entries)[0]
                group.adopt(master_of(placement, placement.raw().clone()))

    def _disown(self) -> None:
        for group in self._groups or ():
            group.users.discard(self)
        self._context.release(self._entries)
        self._groups = None
