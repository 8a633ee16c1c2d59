"""Which device is meant, and whether weights can be offloaded from it."""

import torch

from omni_offload.errors import OffloadStateError

__all__ = ["resolve_device", "unsupported_reason"]


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
