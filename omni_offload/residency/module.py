"""The residency of a module's weights: fetch, bind, unbind, drop; or simply load, offload, restore."""

import contextvars
from collections.abc import Iterable, Sequence

import torch

from omni_offload.cleanup import run_cleanup_steps
from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.device import buffers_of
from omni_offload.residency.group import Group
from omni_offload.residency.managed import ManagedTensors, unwatched
from omni_offload.residency.transfer import copy_in, place

__all__ = ["ModuleResidency", "recording"]

#: Lists that residencies made from here on are added to: how a backend finds those of a pipeline that owns its flow.
recording: contextvars.ContextVar[tuple[list["ModuleResidency"], ...]] = contextvars.ContextVar("recording", default=())


class ModuleResidency(ManagedTensors):
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
        super().__init__(module, device, pin_memory=pin_memory, name=name, context=context)
        for listener in recording.get():
            if context is None and listener:
                self._context.meter = listener[0].meter  # one peak of all that the pipeline makes
            listener.append(self)

    # ---- for pipelines that own their flow ---------------------------------------------------------------------------------

    def load(self) -> None:
        """Copy the weights to the device and bind the tensors there; the current stream waits for the copies, the host does not.

        Raises:
            torch.OutOfMemoryError: As raised; the module is on the host then, as before.
        """
        with self._lock:
            if self.loaded:
                self._await_copies(self._groups or ())
            else:
                self.fetch()
                self.bind()
                if (recorder := self._accelerator.recorder) is not None:
                    recorder.begins(self.name, whole=True)

    def offload(self) -> None:
        """Bind the tensors to the host again and free the device; only what was written on the device is copied back.

        Within `torch.autocast` the cache of casts is cleared: what it made of the weights would stay on the device until its context ends.
        """
        with self._lock:
            if (recorder := self._accelerator.recorder) is not None:
                recorder.ends(self.name)
            self.unbind()
            self.drop()
            if torch.is_autocast_enabled(self._accelerator.device.type):
                torch.clear_autocast_cache()
            self.validate(thorough=True)

    def restore(self, *, copy_back: bool = False, to_origin: bool = False) -> None:
        """Offload, unpin and end the management; the weights are whole, on the host. Idempotent, and repairs what an interrupt left.

        Every step runs; the first failure is raised afterwards, and the module stays managed for another try.

        Args:
            copy_back: Copy every bound device copy back, written or not (for modules that were on the device all the time).
            to_origin: Undo: put weights that were found on the device back to where they were.
        """
        with self._lock:
            error = run_cleanup_steps(
                [
                    (f"find the groups of {self.name}", self._recall),
                    (f"unbind {self.name}", lambda: self.unbind(force=True, copy_back=copy_back)),
                    (f"free the device copies of {self.name}", self.drop),
                    (f"repair the bindings of {self.name}", self._repair),
                    (f"take in what changed in {self.name}", lambda: None if to_origin else self._take_in()),
                    (f"put {self.name} back", lambda: self._settle(to_origin=to_origin)),
                    (f"unpin {self.name}", lambda: self._context.close() if self._owns_context else None),
                ]
            )
            if error is None:
                self._disown()
        if error is not None:
            try:
                raise error
            finally:
                error = None  # no cycle with its traceback, which holds device memory

    # ---- device ------------------------------------------------------------------------------------------------------------

    def fetch(self, *, validated: bool = False) -> bool:
        """Queue copies of what the device does not hold as it is on the host; the host does not block (pinned masters).

        Args:
            validated: The caller has just called `validate`.

        Returns:
            Whether anything had to be copied.

        Raises:
            torch.OutOfMemoryError: As raised; the device copies that nothing is bound to are dropped then.
        """
        with self._lock, unwatched():
            self.prepare()
            if not validated:
                self.validate()
            try:
                return self._fetch(self._groups or ())
            except BaseException:
                self.drop()
                raise

    def _fetch(self, groups: Sequence[Group]) -> bool:
        for group in groups:
            if group.copy is not None and group.copy.buffer.thinned and not group.bound:
                group.drop(self)  # what is held for tensors that are gone is room that was counted as free
            if not group.room_beside(None):
                group.copy = None  # a block's slot is filled with another block
            group.hold(self)
        missing = [group for group in groups if not group.placed]
        stale = [group for group in groups if not group.bound and not group.current()]  # the missing ones among them
        if not stale:
            return False
        if (recorder := self._accelerator.recorder) is not None:
            recorder.copies_for(self.name)
        for together in self._batches(missing):
            place(together, self._accelerator, self._context)
        self.counters.bytes_in += copy_in(stale, self._accelerator, self._context)
        self.counters.loads += bool(missing)
        self.counters.wasted_copies += len(stale) > len(missing)
        return True

    def _batches(self, groups: Sequence[Group]) -> Iterable[Sequence[Group]]:
        """Return groups by what leaves the device together: all."""
        return (groups,)

    def bind(self) -> None:
        """Bind every tensor to its device copy; the current stream waits for the copies. `fetch` comes first."""
        with self._lock, unwatched():
            groups = self._groups or ()
            self._await_copies(groups)
            for group in groups:
                group.bind(self)
            self._follow()

    def _await_copies(self, groups: Sequence[Group]) -> None:
        self._await({buffer.ready for buffer in buffers_of(group.copy for group in groups)})

    def _await(self, landings: Iterable[torch.Event | None]) -> None:
        """Let the current stream wait for copies; the host does not block."""
        stream, recorder = self._accelerator.current_stream(), self._accelerator.recorder
        self._streams[stream.stream_id] = stream
        if recorder is not None:
            recorder.waits(self.name)
        for event in landings:
            if event is not None:
                stream.wait_event(event)
        if recorder is not None:
            recorder.has_waited()

    def unbind(self, *, force: bool = False, copy_back: bool = False) -> None:
        """Bind every tensor to its host master; what was written on the device is copied back first, which blocks the host.

        The device copies stay. The host also waits until the copies that the module ran on have landed, so that masters may be
        edited from here on. Every group is tried; the first failure is raised afterwards.

        Args:
            force: Repair: also where an interrupt left the module half bound.
            copy_back: Copy everything back, written or not.
        """
        with self._lock, unwatched():
            groups = [group for group in self._groups or () if self in group.bound or (force and group.copy is not None)]
            if not groups:
                self._follow()
                return
            self._note_use(groups)
            if (recorder := self._accelerator.recorder) is not None:
                recorder.copies_for(self.name)
            first: BaseException | None = None
            for group in groups:
                try:
                    self.counters.bytes_out += group.unbind(self, force=force, copy_back=copy_back)
                except BaseException as error:  # noqa: BLE001  (raised below)
                    first = error if first is None else first
            self._follow()
            if first is not None:
                try:
                    raise first
                finally:
                    first = None  # no cycle with its traceback, which holds device memory

    def mark_written(self) -> None:
        """Count what is bound to the device as written: edits through `.data`, as peft makes them, move no version counter."""
        with self._lock:
            for group in self._groups or ():
                group.written = self in group.bound

    def _note_use(self, groups: Sequence[Group]) -> None:
        """Record the last use of the device copies, and wait for their landing."""
        events = self._uses()
        for buffer in buffers_of(group.copy for group in groups):
            buffer.uses.update(events)
        self._await_landing(groups)

    def _uses(self) -> dict[int, torch.Event]:
        """Return, per stream that was current at a binding or is now, an event after what was queued there so far."""
        current = self._accelerator.current_stream()
        events = {current.stream_id: current.record_event()}
        for key, stream in self._streams.items():
            if key not in events:
                events[key] = stream.record_event()
                current.wait_event(events[key])
        self._streams.clear()
        return events

    def _await_landing(self, groups: Iterable[Group]) -> None:
        """Wait until what the module ran on has landed: a master may be edited from here on. The host blocks."""
        for ready in {buffer.ready for buffer in buffers_of(group.copy for group in groups)}:  # as a rule one for all
            if ready is not None and not ready.query():
                self._accelerator.block_on(ready)

    def drop(self) -> None:
        """Let go of the device copies that are not bound, in the order of the copy stream; the host does not block."""
        with self._lock, unwatched():
            for group in self._groups or ():
                if self not in group.bound:
                    group.drop(self)

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Take in the groups that an interrupted preparation or regrouping made."""
        if self._begun:
            groups = [*(self._groups or ()), *self._context.known_groups(self._entries)]
            self._groups = list(dict.fromkeys(groups))
            for group in self._groups:
                group.add_user(self)

    def _repair(self) -> None:
        with unwatched():
            for group in self._groups or ():
                group.repair()
            self._follow()

    def _take_in(self) -> None:
        if self._begun and not any(self in group.bound for group in self._groups or ()):
            with unwatched():
                if not self._settled():
                    self._regroup(pin_from=None)

    def _settle(self, *, to_origin: bool) -> None:
        with unwatched():
            for group in self._groups or ():
                if len(group.users) > 1 or group.master is None:
                    continue
                if to_origin and group.origin is not None:
                    group.back_to_origin()
                elif group.master.passing and group.intact():
                    group.move_master()
            self._follow()
            if to_origin:
                self._tables.derived.undo()

    def _disown(self) -> None:
        """End the management."""
        for group in self._groups or ():
            group.users.discard(self)
        self._context.release(self._entries)
        self._groups = None
        self._begun = False
