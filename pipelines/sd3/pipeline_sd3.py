"""Stable Diffusion 3 pipelines that own their offloading: from text, from a picture, into a masked picture."""

from diffusers import StableDiffusion3Img2ImgPipeline, StableDiffusion3InpaintPipeline, StableDiffusion3Pipeline

from pipelines.sd3.parts import StableDiffusion3Parts

__all__ = ["OmniStableDiffusion3Img2ImgPipeline", "OmniStableDiffusion3InpaintPipeline", "OmniStableDiffusion3Pipeline"]


class OmniStableDiffusion3Pipeline(StableDiffusion3Parts, StableDiffusion3Pipeline):
    """`StableDiffusion3Pipeline` that owns its offloading."""


class OmniStableDiffusion3Img2ImgPipeline(StableDiffusion3Parts, StableDiffusion3Img2ImgPipeline):
    """`StableDiffusion3Img2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""


class OmniStableDiffusion3InpaintPipeline(StableDiffusion3Parts, StableDiffusion3InpaintPipeline):
    """`StableDiffusion3InpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""
