"""Stable Diffusion with one ControlNet or several: from text, a picture, a masked picture, and with perturbed attention."""

from typing import ClassVar

from diffusers import (
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPAGInpaintPipeline,
    StableDiffusionControlNetPAGPipeline,
    StableDiffusionControlNetPipeline,
)

from omni_offload import OffloadPlan
from pipelines.leftovers import keeping_attention
from pipelines.parts import with_controlnet
from pipelines.stable_diffusion.parts import PLAN, StableDiffusionParts

__all__ = [
    "OmniStableDiffusionControlNetImg2ImgPipeline",
    "OmniStableDiffusionControlNetInpaintPipeline",
    "OmniStableDiffusionControlNetPAGInpaintPipeline",
    "OmniStableDiffusionControlNetPAGPipeline",
    "OmniStableDiffusionControlNetPipeline",
]

_CONTROL_BLOCKS = ("down_blocks", "mid_block")


class _ControlNetParts(StableDiffusionParts):
    """The components of Stable Diffusion, and a ControlNet.

    ControlNet and UNet alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "unet"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "unet")]

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        return with_controlnet(PLAN, self.controlnet, *_CONTROL_BLOCKS)  # type: ignore[attr-defined]  # of the pipeline behind the parts


class OmniStableDiffusionControlNetPipeline(_ControlNetParts, StableDiffusionControlNetPipeline):
    """`StableDiffusionControlNetPipeline` that owns its offloading."""


class OmniStableDiffusionControlNetImg2ImgPipeline(_ControlNetParts, StableDiffusionControlNetImg2ImgPipeline):
    """`StableDiffusionControlNetImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""


class OmniStableDiffusionControlNetInpaintPipeline(_ControlNetParts, StableDiffusionControlNetInpaintPipeline):
    """`StableDiffusionControlNetInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""


class OmniStableDiffusionControlNetPAGPipeline(_ControlNetParts, StableDiffusionControlNetPAGPipeline):
    """`StableDiffusionControlNetPAGPipeline` that owns its offloading."""

    __call__ = keeping_attention(StableDiffusionControlNetPAGPipeline.__call__, "unet")


class OmniStableDiffusionControlNetPAGInpaintPipeline(_ControlNetParts, StableDiffusionControlNetPAGInpaintPipeline):
    """`StableDiffusionControlNetPAGInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = keeping_attention(StableDiffusionControlNetPAGInpaintPipeline.__call__, "unet")
