"""What a device tells: bytes allocated, copied and pinned, and races. A real accelerator tells less than the simulated one."""

import gc
from typing import Any

import torch

__all__ = ["DeviceFacts", "NotRun"]


class NotRun(Exception):  # noqa: N818  (no error: a check that says why it does not apply)
    """A check does not apply; the message is the reason."""


class DeviceFacts:
    """Reads one device.

    Attributes:
        device: The device, with its index.
        simulated: Whether it is the simulated accelerator, whose copies, pinned bytes, races and failures can be told and made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.simulated = device.type == "sim"

    def allocated(self, *, collect: bool = True) -> int:
        """Return the allocated device bytes, once all queues are empty, and (`collect`) without what is garbage."""
        torch.accelerator.synchronize(self.device)
        found = int(torch.accelerator.memory_allocated(self.device))
        if not collect or not (found or self.pinned()):  # nothing is garbage where there is nothing
            return found
        gc.collect()
        return self.allocated(collect=False)

    def peak(self) -> int:
        """Return the most device bytes since `reset_peak`."""
        torch.accelerator.synchronize(self.device)
        return int(torch.accelerator.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        torch.accelerator.synchronize(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)

    def traffic(self) -> tuple[int, int] | None:
        """Return the bytes copied to the device and to the host so far; None where they are not counted."""
        if not self.simulated:
            return None
        from omni_offload.testing import sim  # noqa: PLC0415  (built on first use)

        return sim.h2d_bytes(), sim.d2h_bytes()

    def pinned(self) -> int:
        """Return the pinned host bytes; 0 where they are not counted."""
        if not self.simulated:
            return 0
        from omni_offload.testing import sim  # noqa: PLC0415  (built on first use)

        return sim.pinned_bytes()

    def race_count(self) -> int:
        """Return how many races were found so far; 0 where none is looked for."""
        if not self.simulated:
            return 0
        from omni_offload.testing import sim  # noqa: PLC0415  (built on first use)

        return len(sim.races())

    def need_simulation(self, what: str) -> Any:
        """Return the simulated accelerator's module.

        Raises:
            NotRun: The check runs on another device.
        """
        if not self.simulated:
            raise NotRun(f"only the simulated accelerator {what}")
        from omni_offload.testing import sim  # noqa: PLC0415  (built on first use)

        return sim
