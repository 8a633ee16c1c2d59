"""Stable Diffusion pipelines that own their offloading: from text, from a picture, into a masked picture."""

from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionPipeline

from pipelines.stable_diffusion.parts import StableDiffusionParts

__all__ = ["OmniStableDiffusionImg2ImgPipeline", "OmniStableDiffusionInpaintPipeline", "OmniStableDiffusionPipeline"]


class OmniStableDiffusionPipeline(StableDiffusionParts, StableDiffusionPipeline):
    """`StableDiffusionPipeline` that owns its offloading."""


class OmniStableDiffusionImg2ImgPipeline(StableDiffusionParts, StableDiffusionImg2ImgPipeline):
    """`StableDiffusionImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""


class OmniStableDiffusionInpaintPipeline(StableDiffusionParts, StableDiffusionInpaintPipeline):
    """`StableDiffusionInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""
