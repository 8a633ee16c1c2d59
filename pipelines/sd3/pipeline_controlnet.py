"""Stable Diffusion 3 pipelines with one ControlNet or several that own their offloading: from text, and into a masked picture."""

from typing import Any, ClassVar

from diffusers import StableDiffusion3ControlNetInpaintingPipeline, StableDiffusion3ControlNetPipeline

from omni_offload import OffloadPlan
from pipelines.parts import with_controlnet
from pipelines.sd3.parts import PLAN, StableDiffusion3Parts

__all__ = ["OmniStableDiffusion3ControlNetInpaintingPipeline", "OmniStableDiffusion3ControlNetPipeline"]


class _ControlNetParts(StableDiffusion3Parts):
    """The components of a Stable Diffusion 3 pipeline with ControlNets.

    ControlNet and DiT alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "transformer"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "transformer")]

    controlnet: Any

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        return with_controlnet(PLAN, self.controlnet, "transformer_blocks")


class OmniStableDiffusion3ControlNetPipeline(_ControlNetParts, StableDiffusion3ControlNetPipeline):
    """`StableDiffusion3ControlNetPipeline` that owns its offloading; the VAE encodes the control pictures before the DiT runs."""


class OmniStableDiffusion3ControlNetInpaintingPipeline(_ControlNetParts, StableDiffusion3ControlNetInpaintingPipeline):
    """`StableDiffusion3ControlNetInpaintingPipeline` that owns its offloading; the VAE encodes the masked picture before the DiT runs."""
