"""Stable Diffusion 3 pipelines with perturbed attention guidance that own their offloading: from text, and from a picture."""

from diffusers import StableDiffusion3PAGImg2ImgPipeline, StableDiffusion3PAGPipeline

from pipelines.leftovers import keeping_attention
from pipelines.sd3.parts import StableDiffusion3TextParts

__all__ = ["OmniStableDiffusion3PAGImg2ImgPipeline", "OmniStableDiffusion3PAGPipeline"]


class OmniStableDiffusion3PAGPipeline(StableDiffusion3TextParts, StableDiffusion3PAGPipeline):
    """`StableDiffusion3PAGPipeline` that owns its offloading."""

    __call__ = keeping_attention(StableDiffusion3PAGPipeline.__call__, "transformer")


class OmniStableDiffusion3PAGImg2ImgPipeline(StableDiffusion3TextParts, StableDiffusion3PAGImg2ImgPipeline):
    """`StableDiffusion3PAGImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = keeping_attention(StableDiffusion3PAGImg2ImgPipeline.__call__, "transformer")
