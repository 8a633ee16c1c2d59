"""Stable Diffusion with guidance by attention: perturbed in some blocks, or blurred where the UNet itself looks."""

from diffusers import (
    StableDiffusionPAGImg2ImgPipeline,
    StableDiffusionPAGInpaintPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionSAGPipeline,
)

from pipelines.leftovers import keeping_attention
from pipelines.stable_diffusion.parts import StableDiffusionParts

__all__ = [
    "OmniStableDiffusionPAGImg2ImgPipeline",
    "OmniStableDiffusionPAGInpaintPipeline",
    "OmniStableDiffusionPAGPipeline",
    "OmniStableDiffusionSAGPipeline",
]


class OmniStableDiffusionPAGPipeline(StableDiffusionParts, StableDiffusionPAGPipeline):
    """`StableDiffusionPAGPipeline` that owns its offloading."""

    __call__ = keeping_attention(StableDiffusionPAGPipeline.__call__, "unet")


class OmniStableDiffusionPAGImg2ImgPipeline(StableDiffusionParts, StableDiffusionPAGImg2ImgPipeline):
    """`StableDiffusionPAGImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = keeping_attention(StableDiffusionPAGImg2ImgPipeline.__call__, "unet")


class OmniStableDiffusionPAGInpaintPipeline(StableDiffusionParts, StableDiffusionPAGInpaintPipeline):
    """`StableDiffusionPAGInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = keeping_attention(StableDiffusionPAGInpaintPipeline.__call__, "unet")


class OmniStableDiffusionSAGPipeline(StableDiffusionParts, StableDiffusionSAGPipeline):
    """`StableDiffusionSAGPipeline` that owns its offloading; it keeps what the middle block looked at, and runs the UNet again."""

    __call__ = keeping_attention(StableDiffusionSAGPipeline.__call__, "unet")
