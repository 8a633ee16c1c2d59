"""The only file that knows streams, events, pinning, host registration and allocator caches.

It speaks `torch.accelerator`, `torch.get_device_module` and the generic `torch.Stream` and `torch.Event`, so that CUDA, ROCm,
XPU, NPU and the simulated device take the same path.
"""

import functools
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs
import torch

from omni_offload.errors import OffloadStateError

if TYPE_CHECKING:
    from omni_offload.trace import Recorder

__all__ = ["Accelerator", "DeviceClock", "PinnedMemory", "host_memory_limit", "resolve_device", "unsupported_reason"]

logger = logging.getLogger(__name__)

_CGROUPS = Path("/sys/fs/cgroup")

_Work = TypeVar("_Work")


class _Waitable(Protocol):
    def wait(self) -> object: ...


def resolve_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device with its index: the one asked for, else the current accelerator.

    Args:
        device: A device, its name, or None for the machine's current accelerator. A missing index means the current one.

    Raises:
        OffloadStateError: No accelerator that can be offloaded from is there; the message says which was found.
    """
    found = torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
    if found is None:
        raise OffloadStateError(
            "offloading was asked for without a device, and torch.accelerator finds no accelerator on this machine; name one"
        )
    reason = unsupported_reason(found)
    if reason is not None:
        raise OffloadStateError(f"offloading was asked for on device {str(found)!r}: {reason}")
    index = torch.accelerator.current_device_index() if found.index is None else found.index
    if not 0 <= index < torch.accelerator.device_count():
        raise OffloadStateError(
            f"offloading was asked for on device '{found.type}:{index}', but there are {torch.accelerator.device_count()} "
            f"{found.type} device(s); choose an index below that"
        )
    return torch.device(found.type, index)


def unsupported_reason(device: torch.device | None) -> str | None:
    """Say why weights cannot be offloaded from a device, or None where they can."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None if current is not None else "torch.accelerator finds no accelerator on this machine"
    if device.type == "cpu":
        return "the weights are on the host already; give an accelerator"
    if device.type == "mps":
        return "it shares its memory with the host, so there is nothing to gain"
    if current is None or current.type != device.type:
        return f"this machine's accelerator is {current.type if current else 'none'}; only that one is managed"
    return None


def host_memory_limit() -> int | None:
    """Return the most host memory (bytes) that this process may use: its control groups' limits, else the machine's memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    for path in _limit_files():
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits, default=None)


def _limit_files() -> list[Path]:
    """Return the files that may limit this process: of its own control group (version 2) and all above it, and of version 1."""
    table = Path("/proc/self/cgroup")
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = _CGROUPS / own
    above = [group, *group.parents]
    return [*(path / "memory.max" for path in above if path.is_relative_to(_CGROUPS)), _CGROUPS / "memory" / "memory.limit_in_bytes"]


@attrs.frozen
class _Registrar:
    """A device module's page locking of memory that exists: `cudaHostRegister` or its like."""

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


def _registrar(device: torch.device) -> _Registrar | None:
    module = torch.get_device_module(device)
    if hasattr(module, "host_register"):
        return _Registrar(module.host_register, module.host_unregister)
    if hasattr(module, "cudart"):
        runtime = module.cudart()
        return _Registrar(
            lambda pointer, nbytes: module.check_error(int(runtime.cudaHostRegister(pointer, nbytes, 0))),
            lambda pointer: module.check_error(int(runtime.cudaHostUnregister(pointer))),
        )
    return None


class PinnedMemory:
    """One page-locked host region of exactly the size asked for, where the device can lock memory that exists.

    `torch.empty(pin_memory=True)` rounds sizes up to powers of two in torch's caching host allocator; an anonymous mapping that is
    registered afterwards does not. Devices without host registration fall back to it, and `charged` says what it costs.

    Args:
        accelerator: The device that will copy from the region.
        nbytes: Size in bytes, at least 1.

    Raises:
        RuntimeError: The device refused to lock that much; nothing is held then.
    """

    def __init__(self, accelerator: "Accelerator", nbytes: int) -> None:
        self._registrar = registrar = _registrar(accelerator.device)
        self.nbytes = nbytes
        self.stays_pinned = registrar is None
        self.charged = PinnedMemory.cost(accelerator, nbytes)
        self._accelerator = accelerator
        self._memory: mmap.mmap | None = None
        self._unlock: weakref.finalize[..., PinnedMemory] | None = None
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunction():  # noqa: SLF001  (a default device must not move it)
            if registrar is None:
                self.raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                return
            self._memory = mmap.mmap(-1, nbytes)
            self.raw = torch.frombuffer(self._memory, dtype=torch.uint8)
        pointer = self.raw.data_ptr()
        self._unlock = weakref.finalize(self, _unregister, accelerator, registrar, pointer)  # first: an interrupt may follow
        try:
            registrar.register(pointer, nbytes)
        except Exception:
            self._unlock.detach()
            raise

    @staticmethod
    def cost(accelerator: "Accelerator", nbytes: int) -> int:
        """Return the bytes that pinning so many takes: where the device cannot lock memory that exists, a power of two."""
        return nbytes if nbytes < 1 or _registrar(accelerator.device) else 1 << (nbytes - 1).bit_length()

    @property
    def pinned(self) -> bool:
        """Whether the region is still page-locked."""
        return self.stays_pinned or (self._unlock is not None and self._unlock.alive)

    def slice(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes `[offset, offset + nbytes)` as a uint8 tensor; its storage is exactly that range, unless `stays_pinned`."""
        if self._memory is None or nbytes == 0:
            return self.raw[offset : offset + nbytes]
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunction():  # noqa: SLF001  (as above)
            return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)

    def unpin(self) -> None:
        """Unlock the pages once the device has read them; tensors on the region stay valid, as ordinary memory. Idempotent.

        Blocks the host until queued copies from the region are done. Does nothing where the region `stays_pinned`: its memory goes
        with its last tensor.
        """
        if self._registrar is not None and self._unlock is not None and self._unlock.alive:
            _unregister(self._accelerator, self._registrar, self.raw.data_ptr())
            self._unlock.detach()  # last: after an interrupt it can be done again


def _unregister(accelerator: "Accelerator", registrar: _Registrar, pointer: int) -> None:
    try:
        accelerator.copy_stream.synchronize()
    finally:
        try:
            registrar.unregister(pointer)
        except RuntimeError as error:  # an interrupt came before its registration, or after its end
            logger.debug("the region was not locked: %s", error)


class Accelerator:
    """A device that weights are copied to: its copy stream, its events and its memory.

    One object a device (`Accelerator.of`), so that all backends share one copy stream: a device has one copy engine a direction.

    Attributes:
        recorder: What notes copies, waits and uses, while a recording runs; None: nothing is noted, which costs this look.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy_stream = torch.Stream(device)
        self.recorder: Recorder | None = None

    @staticmethod
    def of(device: torch.device) -> "Accelerator":
        """Return the process's one object for a device that has an index."""
        return _accelerator(device)

    def current_stream(self) -> torch.Stream:
        """Return the stream that the caller's kernels go to."""
        return torch.accelerator.current_stream(self.device.index)

    @functools.cached_property
    def idle_stream(self) -> torch.Stream:
        """A stream on which nothing runs: what is recorded on it fires at once."""
        return torch.Stream(self.device)

    @functools.cached_property
    def gather_stream(self) -> torch.Stream:
        """The stream that collectives of weights are ordered on: beside copies, and beside the caller's kernels and collectives."""
        return torch.Stream(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of device memory (uint8) that belong to the copy stream.

        Freed memory is handed out again in the order of the copy stream, so whoever frees it first lets the copy stream wait for
        the last reader (`after`). The host does not block.

        Raises:
            torch.OutOfMemoryError: As the device's allocator raised it.
        """
        with torch.inference_mode(mode=False), self.copy_stream:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool = True) -> None:
        """Queue a host-to-device copy of bytes on the copy stream; a source that is not pinned blocks the host until it is done."""
        recorder = self.recorder
        if recorder is not None:
            recorder.copy_begins(self.copy_stream, source, blocks=not pinned)
        with self.copy_stream:
            target.copy_(source, non_blocking=True)
        if recorder is not None:
            recorder.copy_ends(self.copy_stream, source)

    def to_host(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy bytes to the host and return them there; the host blocks.

        Args:
            source: The bytes; where they are on the host and no target is given, they are returned themselves.
            target: Where they go; None: to memory of their own.
        """
        recorder = self.recorder if source.device == self.device else None
        if recorder is not None:
            recorder.copy_begins(self.current_stream(), source, blocks=True)
        with torch.inference_mode(mode=False):
            copied = source.cpu() if target is None else target.copy_(source)
        if recorder is not None:
            recorder.copy_ends(self.current_stream(), source)
        return copied

    def record_copies(self) -> torch.Event:
        """Return an event that fires when all copies queued so far have landed."""
        return self.copy_stream.record_event()

    def gather(self, collective: Callable[[], _Work]) -> _Work:
        """Queue a collective behind all copies queued so far; the host does not block, unless the collective's backend does."""
        self.gather_stream.wait_event(self.record_copies())
        with self.gather_stream:
            return collective()

    def end_gather(self, work: Iterable[_Waitable]) -> torch.Event:
        """Return an event that fires when collectives are done; the host blocks where their backend runs them on the host (gloo)."""
        with self.gather_stream:
            for one in work:
                one.wait()
        return self.gather_stream.record_event()

    def record_compute(self) -> tuple[torch.Stream, torch.Event]:
        """Return the current stream and an event that fires when all kernels queued on it so far are done."""
        stream = self.current_stream()
        return stream, stream.record_event()

    def after(self, event: torch.Event) -> None:
        """Let the copy stream wait for an event; the host does not block."""
        recorder = self.recorder
        if recorder is not None:
            recorder.copies_wait(self.copy_stream)
        self.copy_stream.wait_event(event)
        if recorder is not None:
            recorder.copies_go_on(self.copy_stream)

    def wait(self, event: torch.Event) -> None:
        """Let the current stream wait for an event; the host does not block."""
        self.current_stream().wait_event(event)

    def block(self) -> None:
        """Let the host wait for all that the device has to do."""
        torch.accelerator.synchronize(self.device)

    def block_on(self, event: torch.Event) -> None:
        """Let the host wait for an event."""
        recorder = self.recorder
        if recorder is not None:
            recorder.host_waits()
        event.synchronize()
        if recorder is not None:
            recorder.host_goes_on()


@functools.cache
def _accelerator(device: torch.device) -> Accelerator:
    return Accelerator(device)


class DeviceClock:
    """Tells when a device reached a place of a stream: by timing events, else (where it has none) by the host's clock.

    A moment is noted at once and read later, when the device has done everything. What the host does is noted on a stream on which
    nothing runs, so that it stands on the same scale.

    Attributes:
        problem: Why the device cannot time events; None where it can.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._device = accelerator.device
        self._host = accelerator.idle_stream
        self._began = time.perf_counter()
        self._first: torch.Event | None = None
        self.problem: str | None = None
        try:
            self._first = _timing_event(self._device, self._host)
            self.seconds(self.now())
        except (RuntimeError, TypeError) as error:
            self.problem = f"{self._device} cannot time events ({type(error).__name__}: {error})"

    def at(self, stream: torch.Stream) -> torch.Event | float:
        """Note the moment at which a stream will have done all that is queued on it so far; the host does not block."""
        return _timing_event(self._device, stream) if self.problem is None else time.perf_counter()

    def now(self) -> torch.Event | float:
        """Note what the time is for the host."""
        return self.at(self._host)

    def between(self, first: torch.Event, last: torch.Event) -> float:
        """Return the seconds from one moment to another, both of which have passed."""
        return first.elapsed_time(last) / 1e3

    def seconds(self, moment: torch.Event | float) -> float:
        """Return a moment as seconds since the clock was made; the host waits for it."""
        if self._first is None or isinstance(moment, float):
            return float(moment) - self._began  # type: ignore[arg-type]  # without a first event there are no others
        moment.synchronize()
        return self._first.elapsed_time(moment) / 1e3


def _timing_event(device: torch.device, stream: torch.Stream) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record(stream)
    return event
