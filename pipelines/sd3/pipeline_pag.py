"""Stable Diffusion 3 pipelines with perturbed attention guidance that own their offloading: from text, and from a picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import StableDiffusion3PAGImg2ImgPipeline, StableDiffusion3PAGPipeline

from pipelines.attention import keeping_attention
from pipelines.sd3.parts import TEXT_ENTRY_POINTS, StableDiffusion3TextParts

__all__ = ["OmniStableDiffusion3PAGImg2ImgPipeline", "OmniStableDiffusion3PAGPipeline"]


class OmniStableDiffusion3PAGPipeline(StableDiffusion3TextParts, StableDiffusion3PAGPipeline):
    """`StableDiffusion3PAGPipeline` that owns its offloading."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = TEXT_ENTRY_POINTS

    __call__ = keeping_attention(StableDiffusion3PAGPipeline.__call__, "transformer")


class OmniStableDiffusion3PAGImg2ImgPipeline(StableDiffusion3TextParts, StableDiffusion3PAGImg2ImgPipeline):
    """`StableDiffusion3PAGImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = TEXT_ENTRY_POINTS

    __call__ = keeping_attention(StableDiffusion3PAGImg2ImgPipeline.__call__, "transformer")
