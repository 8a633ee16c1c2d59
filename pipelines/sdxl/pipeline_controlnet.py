"""Stable Diffusion XL pipelines with one ControlNet or several that own their offloading."""

from typing import Any, ClassVar

from diffusers import (
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetPAGImg2ImgPipeline,
    StableDiffusionXLControlNetPAGPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLControlNetUnionImg2ImgPipeline,
    StableDiffusionXLControlNetUnionInpaintPipeline,
    StableDiffusionXLControlNetUnionPipeline,
)

from omni_offload import OffloadPlan
from pipelines.leftovers import casting_back, keeping_attention
from pipelines.parts import with_controlnet
from pipelines.sdxl.parts import ENCODERS, PLAN, StableDiffusionXLParts

__all__ = [
    "OmniStableDiffusionXLControlNetImg2ImgPipeline",
    "OmniStableDiffusionXLControlNetInpaintPipeline",
    "OmniStableDiffusionXLControlNetPAGImg2ImgPipeline",
    "OmniStableDiffusionXLControlNetPAGPipeline",
    "OmniStableDiffusionXLControlNetPipeline",
    "OmniStableDiffusionXLControlNetUnionImg2ImgPipeline",
    "OmniStableDiffusionXLControlNetUnionInpaintPipeline",
    "OmniStableDiffusionXLControlNetUnionPipeline",
]


_CONTROL_BLOCKS = ("down_blocks", "mid_block")


class _ControlNetParts(StableDiffusionXLParts):
    """The components of a Stable Diffusion XL pipeline with ControlNets.

    ControlNet and UNet alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "unet"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [ENCODERS, ("controlnet", "unet")]

    controlnet: Any

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        return with_controlnet(PLAN, self.controlnet, *_CONTROL_BLOCKS)


class OmniStableDiffusionXLControlNetPipeline(_ControlNetParts, StableDiffusionXLControlNetPipeline):
    """`StableDiffusionXLControlNetPipeline` that owns its offloading."""

    __call__ = casting_back(StableDiffusionXLControlNetPipeline.__call__)


class OmniStableDiffusionXLControlNetImg2ImgPipeline(_ControlNetParts, StableDiffusionXLControlNetImg2ImgPipeline):
    """`StableDiffusionXLControlNetImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = casting_back(StableDiffusionXLControlNetImg2ImgPipeline.__call__)


class OmniStableDiffusionXLControlNetInpaintPipeline(_ControlNetParts, StableDiffusionXLControlNetInpaintPipeline):
    """`StableDiffusionXLControlNetInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = casting_back(StableDiffusionXLControlNetInpaintPipeline.__call__)


class OmniStableDiffusionXLControlNetPAGPipeline(_ControlNetParts, StableDiffusionXLControlNetPAGPipeline):
    """`StableDiffusionXLControlNetPAGPipeline` that owns its offloading."""

    __call__ = keeping_attention(casting_back(StableDiffusionXLControlNetPAGPipeline.__call__), "unet")


class OmniStableDiffusionXLControlNetPAGImg2ImgPipeline(_ControlNetParts, StableDiffusionXLControlNetPAGImg2ImgPipeline):
    """`StableDiffusionXLControlNetPAGImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = keeping_attention(casting_back(StableDiffusionXLControlNetPAGImg2ImgPipeline.__call__), "unet")


class OmniStableDiffusionXLControlNetUnionPipeline(_ControlNetParts, StableDiffusionXLControlNetUnionPipeline):
    """`StableDiffusionXLControlNetUnionPipeline` that owns its offloading."""

    __call__ = casting_back(StableDiffusionXLControlNetUnionPipeline.__call__)


class OmniStableDiffusionXLControlNetUnionImg2ImgPipeline(_ControlNetParts, StableDiffusionXLControlNetUnionImg2ImgPipeline):
    """`StableDiffusionXLControlNetUnionImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = casting_back(StableDiffusionXLControlNetUnionImg2ImgPipeline.__call__)


class OmniStableDiffusionXLControlNetUnionInpaintPipeline(_ControlNetParts, StableDiffusionXLControlNetUnionInpaintPipeline):
    """`StableDiffusionXLControlNetUnionInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = casting_back(StableDiffusionXLControlNetUnionInpaintPipeline.__call__)
