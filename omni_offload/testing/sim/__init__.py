"""A software accelerator for tests: a real torch device, `sim`, on the CPU.

Models run on it bit for bit as on the CPU. Copies are asynchronous, memory is accounted for and may run out, time is
virtual and exact, and a vector-clock checker names every pair of operations that lacks a wait between them.

    from omni_offload.testing import sim

    device = sim.install(races="raise", h2d_gbps=2.0)
    model.to(device)

What it does not show: kernels run on the caller's thread, so that in threads mode the host runs ahead of copies and of `spin` only;
temporaries inside one kernel are not charged; there is no fragmentation and no rounding of pinned sizes; two interleaved strided
views count as overlapping; all threads of the host share one clock, and races between them are not seen; a pointer to device
memory can be read by the host. Recurrent layers have no backward pass. `safetensors` refuses the device's name: load
on the host and move.
"""

from omni_offload.testing.sim.device import install, why_unavailable
from omni_offload.testing.sim.records import (
    Race,
    Span,
    allocated,
    allocation_count,
    clock,
    d2h_bytes,
    h2d_bytes,
    host_work,
    peak,
    pin_count,
    pinned_bytes,
    pinned_peak,
    races,
    reset_counters,
    reset_peak,
    reset_races,
    spin,
    trace,
)
from omni_offload.testing.sim.settings import Settings, configure, current_settings, settings
from omni_offload.testing.sim.watch import watch_host

__all__ = [
    "Race",
    "Settings",
    "Span",
    "allocated",
    "allocation_count",
    "clock",
    "configure",
    "current_settings",
    "d2h_bytes",
    "h2d_bytes",
    "host_work",
    "install",
    "peak",
    "pin_count",
    "pinned_bytes",
    "pinned_peak",
    "races",
    "reset_counters",
    "reset_peak",
    "reset_races",
    "settings",
    "spin",
    "trace",
    "watch_host",
    "why_unavailable",
]
