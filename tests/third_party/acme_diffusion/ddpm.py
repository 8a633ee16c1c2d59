"""A diffusers class that omni-offload does not bring."""

from typing import ClassVar

from diffusers import DDPMPipeline

from omni_offload import OmniOffloadMixin

__all__ = ["OmniDDPMPipeline"]


class OmniDDPMPipeline(OmniOffloadMixin, DDPMPipeline):
    """Unconditional denoising: one component."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []
