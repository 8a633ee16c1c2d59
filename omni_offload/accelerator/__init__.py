"""The only room that knows streams, events, pinning, host registration and allocator caches.

It speaks `torch.accelerator`, `torch.get_device_module` and the generic `torch.Stream` and `torch.Event`, so that CUDA, ROCm,
XPU, NPU and the simulated device take the same path.
"""

from omni_offload.accelerator.clock import DeviceClock
from omni_offload.accelerator.observer import Meter, Observer
from omni_offload.accelerator.pinned import PinnedMemory, Registration, host_memory_limit
from omni_offload.accelerator.streams import Accelerator
from omni_offload.accelerator.support import resolve_device, unsupported_reason

__all__ = [
    "Accelerator",
    "DeviceClock",
    "Meter",
    "Observer",
    "PinnedMemory",
    "Registration",
    "host_memory_limit",
    "resolve_device",
    "unsupported_reason",
]
