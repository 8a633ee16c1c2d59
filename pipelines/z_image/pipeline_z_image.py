"""Z-Image pipelines that own their offloading: from text, from a picture, into a masked picture, after other pictures."""

from typing import ClassVar

import attrs
from diffusers import ZImageImg2ImgPipeline, ZImageInpaintPipeline, ZImageOmniPipeline, ZImagePipeline

from omni_offload import OffloadPlan
from pipelines.z_image.parts import PLAN, ZImageParts, with_own_positions

__all__ = ["OmniZImageImg2ImgPipeline", "OmniZImageInpaintPipeline", "OmniZImageOmniPipeline", "OmniZImagePipeline"]


class OmniZImagePipeline(ZImageParts, ZImagePipeline):
    """`ZImagePipeline` that owns its offloading."""

    __call__ = with_own_positions(ZImagePipeline.__call__)


class OmniZImageImg2ImgPipeline(ZImageParts, ZImageImg2ImgPipeline):
    """`ZImageImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = with_own_positions(ZImageImg2ImgPipeline.__call__)


class OmniZImageInpaintPipeline(ZImageParts, ZImageInpaintPipeline):
    """`ZImageInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = with_own_positions(ZImageInpaintPipeline.__call__)


class OmniZImageOmniPipeline(ZImageParts, ZImageOmniPipeline):
    """`ZImageOmniPipeline` that owns its offloading; VAE and image encoder see the pictures before the DiT runs."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "siglip"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        PLAN,
        block_attrs={"transformer": ("noise_refiner", "context_refiner", "siglip_refiner", "layers")},
        encoder_block_attrs={**PLAN.encoder_block_attrs, "siglip": ("encoder.layers",)},
    )
    __call__ = with_own_positions(ZImageOmniPipeline.__call__)
