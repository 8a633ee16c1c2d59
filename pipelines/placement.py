"""Pipelines that ask themselves for the device that they are on, where others ask for the one that they work on."""

from typing import Any

import torch

__all__ = ["OnItsDevice"]


class OnItsDevice:
    """Stands before the components' mixin: while offload is enabled, `device` is the device that components come to.

    Upstream's `device` is the first component's, which is on the host between uses. A pipeline that puts its noise there would mix
    it with what its components return.
    """

    @property
    def device(self) -> torch.device:
        """Where the pipeline works: the offload device while offload is enabled, else where its components are."""
        backend: Any = getattr(self, "offload_backend", None)
        device: torch.device = super().device if backend is None else backend.device  # type: ignore[misc]  # the pipeline's own
        return device
