"""Registration of the device type `sim` with torch, and the module `torch.sim`."""

import atexit
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from omni_offload.errors import OffloadStateError
from omni_offload.testing.sim.build import why_not_buildable
from omni_offload.testing.sim.library import DEVICE_TYPE, Library, device_index, library, load
from omni_offload.testing.sim.settings import check, configure

__all__ = ["install", "why_unavailable"]

MEMORY_FUNCTIONS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
)


def install(**settings: object) -> torch.device:
    """Make the device type `sim` exist in this process, and apply settings; again: only apply settings.

    The first use on a machine builds the library (about 20 seconds, kept in a cache). There is no way back: torch takes
    one out-of-tree backend a process, for good, and `torch.accelerator` then speaks of `sim`.

    Args:
        **settings: The fields of `Settings`, as for `configure`.

    Returns:
        `torch.device("sim", 0)`.

    Raises:
        OffloadConfigError: An unknown setting or a wrong value; nothing was touched.
        OffloadStateError: The library cannot be built or loaded, or another backend has taken the place.
    """
    check({name: value for name, value in settings.items() if value is not None})
    if reason := _occupied():
        raise OffloadStateError(reason)
    lib, first = load()
    if first:
        _register(lib)
        _correct_diffusers()
    configure(**settings)
    if first:
        torch.empty(1, pin_memory=True)  # initialises the device type in torch, before which nothing counts as pinned
    return torch.device(DEVICE_TYPE, 0)


def why_unavailable() -> str | None:
    """Say why `install` would fail (no compiler and no cached build, a torch too old, the place taken), or return None.

    Builds nothing.
    """
    return _occupied() or why_not_buildable()


def _occupied() -> str | None:
    name = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  (torch has no public name for it)
    if name in ("privateuseone", DEVICE_TYPE):
        return None
    return f"torch takes one out-of-tree backend a process, and {name!r} is registered already; use a process without it"


def _register(lib: Library) -> None:
    rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, _device_module(lib))  # type: ignore[no-untyped-call]  # noqa: SLF001
    generate_methods_for_privateuse1_backend(for_storage=True)
    # A stream's thread that drops a Python-owned tensor after the interpreter has ended would abort the process.
    atexit.register(lib.drain)


def _correct_diffusers() -> None:
    """Let diffusers look again: imported before, it remembers that there is no accelerator."""
    module = sys.modules.get("diffusers.utils.torch_utils")
    detect = getattr(getattr(module, "TorchDeviceBackend", None), "_detect_device_type", None)
    if detect is not None:  # as of diffusers 0.42
        detect.cache_clear()


class _StreamContext:
    """Make a stream the current one of its device; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._former: torch.Stream | None = None

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._former = torch.accelerator.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._former is not None:
            torch.accelerator.set_stream(self._former)


class _DeviceContext:
    """Make a device the current one; None, and a negative index, change nothing."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self._wanted = device
        self._former = -1

    def __enter__(self) -> None:
        self._former = library().current_device()
        if self._wanted is not None and self._wanted != -1:
            library().set_device(device_index(self._wanted))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        library().set_device(self._former)


def _device_module(lib: Library) -> ModuleType:
    """Build `torch.sim` from what torch and its libraries look for on a device module."""
    module = ModuleType(f"torch.{DEVICE_TYPE}", "The software accelerator as a torch device module.")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lib.bad_fork,
        get_device_name=lambda _device=None: DEVICE_TYPE,
        get_device_properties=_properties,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda *_args, **_kwargs: True,
        host_register=lib.host_register,
        host_unregister=lib.host_unregister,
        **_device_functions(lib),
        **_random_functions(lib),
        **_memory_functions(),
    )
    return module


def _device_functions(lib: Library) -> dict[str, Any]:
    accelerator = torch.accelerator
    return {
        "device": _DeviceContext,
        "device_count": lib.device_count,
        "current_device": lib.current_device,
        "set_device": lambda device: lib.set_device(device_index(device)),
        "synchronize": lambda device=None: accelerator.synchronize(device_index(device)),
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": _StreamContext,
        "current_stream": lambda device=None: accelerator.current_stream(device_index(device)),
        "default_stream": _default_stream,
        "set_stream": accelerator.set_stream,
    }


def _default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value  # noqa: SLF001
    return torch.Stream(stream_id=0, device_index=device_index(device), device_type=kind)


def _random_functions(lib: Library) -> dict[str, Any]:
    def seed(value: int) -> None:
        lib.seed_all(int(value) & (2**64 - 1))

    return {
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda device=None: lib.rng_state(device_index(device)),
        "set_rng_state": lambda state, device=None: lib.set_rng_state(state, device_index(device)),
    }


def _memory_functions() -> dict[str, Any]:
    def of_device(function: Callable[[int], Any]) -> Callable[..., Any]:
        return lambda device=None: function(device_index(device))

    functions = {name: of_device(getattr(torch.accelerator, name)) for name in MEMORY_FUNCTIONS}
    return {
        **functions,
        "empty_cache": torch.accelerator.empty_cache,
        "mem_get_info": of_device(torch.accelerator.get_memory_info),
    }


def _properties(device: torch.device | str | int | None = None) -> SimpleNamespace:
    total = torch.accelerator.get_memory_info(device_index(device))[1]
    return SimpleNamespace(name=DEVICE_TYPE, total_memory=total)
