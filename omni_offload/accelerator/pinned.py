"""Page-locked host memory, and how much host memory there is."""

import logging
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

from omni_offload.accelerator.streams import Accelerator

__all__ = ["PinnedMemory", "Registration", "host_memory_limit"]

logger = logging.getLogger(__name__)

_CGROUPS = Path("/sys/fs/cgroup")


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


class Registration:
    """Host memory that exists, page-locked until `end`.

    Pages of a file that is mapped privately become the process's own: they are locked for writing. Locked for reading they could stay
    shared, but what the host wrote later would go to another page than the device reads.

    Args:
        accelerator: The device that will copy from it.
        pointer: Address of the first byte.
        nbytes: How many bytes.
        memory: What owns them; kept until they are unlocked.

    Raises:
        RuntimeError: The device refused to lock them, or cannot lock memory that exists.
    """

    def __init__(self, accelerator: Accelerator, pointer: int, nbytes: int, memory: object) -> None:
        registrar = _registrar(accelerator.device)
        if registrar is None:
            raise RuntimeError(f"{accelerator.device} cannot lock host memory that exists")
        self._unlock = weakref.finalize(self, _unregister, accelerator, registrar, pointer, memory)  # first: an interrupt may follow
        try:
            registrar.register(pointer, nbytes)
        except Exception:
            self._unlock.detach()
            raise

    def end(self) -> None:
        """Unlock the pages once the device has read them. Blocks the host until then. Idempotent."""
        found = self._unlock.peek()
        if found is not None:
            _, unregister, arguments, _ = found
            unregister(*arguments)
            self._unlock.detach()  # last: after an interrupt it can be done again


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

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
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
    def cost(accelerator: Accelerator, nbytes: int) -> int:
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


def _unregister(accelerator: Accelerator, registrar: _Registrar, pointer: int, _: object = None) -> None:
    try:
        accelerator.copy_stream.synchronize()
    finally:
        try:
            registrar.unregister(pointer)
        except RuntimeError as error:  # an interrupt came before its registration, or after its end
            logger.debug("the region was not locked: %s", error)
