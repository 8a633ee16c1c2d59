"""Stable Diffusion XL pipelines with perturbed attention guidance that own their offloading: from text, pictures and masked pictures."""

from diffusers import StableDiffusionXLPAGImg2ImgPipeline, StableDiffusionXLPAGInpaintPipeline, StableDiffusionXLPAGPipeline

from pipelines.leftovers import casting_back, keeping_attention
from pipelines.sdxl.parts import StableDiffusionXLParts

__all__ = ["OmniStableDiffusionXLPAGImg2ImgPipeline", "OmniStableDiffusionXLPAGInpaintPipeline", "OmniStableDiffusionXLPAGPipeline"]


class OmniStableDiffusionXLPAGPipeline(StableDiffusionXLParts, StableDiffusionXLPAGPipeline):
    """`StableDiffusionXLPAGPipeline` that owns its offloading."""

    __call__ = keeping_attention(casting_back(StableDiffusionXLPAGPipeline.__call__), "unet")


class OmniStableDiffusionXLPAGImg2ImgPipeline(StableDiffusionXLParts, StableDiffusionXLPAGImg2ImgPipeline):
    """`StableDiffusionXLPAGImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = keeping_attention(casting_back(StableDiffusionXLPAGImg2ImgPipeline.__call__), "unet")


class OmniStableDiffusionXLPAGInpaintPipeline(StableDiffusionXLParts, StableDiffusionXLPAGInpaintPipeline):
    """`StableDiffusionXLPAGInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = keeping_attention(casting_back(StableDiffusionXLPAGInpaintPipeline.__call__), "unet")
