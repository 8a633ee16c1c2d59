"""Stable Diffusion pipelines that own their offloading: from text, from a picture, into a masked picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionPipeline

from pipelines.stable_diffusion.parts import ENTRY_POINTS, StableDiffusionParts

__all__ = ["OmniStableDiffusionImg2ImgPipeline", "OmniStableDiffusionInpaintPipeline", "OmniStableDiffusionPipeline"]


class OmniStableDiffusionPipeline(StableDiffusionParts, StableDiffusionPipeline):
    """`StableDiffusionPipeline` that owns its offloading."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniStableDiffusionImg2ImgPipeline(StableDiffusionParts, StableDiffusionImg2ImgPipeline):
    """`StableDiffusionImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniStableDiffusionInpaintPipeline(StableDiffusionParts, StableDiffusionInpaintPipeline):
    """`StableDiffusionInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
