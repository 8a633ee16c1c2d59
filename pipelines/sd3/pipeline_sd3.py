"""Stable Diffusion 3 pipelines that own their offloading: from text, from a picture, into a masked picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import StableDiffusion3Img2ImgPipeline, StableDiffusion3InpaintPipeline, StableDiffusion3Pipeline

from pipelines.sd3.parts import ENTRY_POINTS, StableDiffusion3Parts

__all__ = ["OmniStableDiffusion3Img2ImgPipeline", "OmniStableDiffusion3InpaintPipeline", "OmniStableDiffusion3Pipeline"]


class OmniStableDiffusion3Pipeline(StableDiffusion3Parts, StableDiffusion3Pipeline):
    """`StableDiffusion3Pipeline` that owns its offloading."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniStableDiffusion3Img2ImgPipeline(StableDiffusion3Parts, StableDiffusion3Img2ImgPipeline):
    """`StableDiffusion3Img2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniStableDiffusion3InpaintPipeline(StableDiffusion3Parts, StableDiffusion3InpaintPipeline):
    """`StableDiffusion3InpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
