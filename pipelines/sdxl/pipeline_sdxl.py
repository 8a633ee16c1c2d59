"""Stable Diffusion XL pipelines that own their offloading: from text, from a picture, into a masked picture, and editing a picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    StableDiffusionXLAdapterPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
    StableDiffusionXLPipeline,
)

from omni_offload import OffloadPlan
from pipelines.leftovers import casting_back
from pipelines.parts import with_adapter
from pipelines.sdxl.parts import ENCODERS, PLAN, StableDiffusionXLParts, StableDiffusionXLTextParts

__all__ = [
    "OmniStableDiffusionXLAdapterPipeline",
    "OmniStableDiffusionXLImg2ImgPipeline",
    "OmniStableDiffusionXLInpaintPipeline",
    "OmniStableDiffusionXLInstructPix2PixPipeline",
    "OmniStableDiffusionXLPipeline",
]


class OmniStableDiffusionXLPipeline(StableDiffusionXLParts, StableDiffusionXLPipeline):
    """`StableDiffusionXLPipeline` that owns its offloading."""

    __call__ = casting_back(StableDiffusionXLPipeline.__call__)


class OmniStableDiffusionXLImg2ImgPipeline(StableDiffusionXLParts, StableDiffusionXLImg2ImgPipeline):
    """`StableDiffusionXLImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = casting_back(StableDiffusionXLImg2ImgPipeline.__call__)


class OmniStableDiffusionXLInpaintPipeline(StableDiffusionXLParts, StableDiffusionXLInpaintPipeline):
    """`StableDiffusionXLInpaintPipeline` that owns its offloading; the VAE runs before the UNet too."""

    __call__ = casting_back(StableDiffusionXLInpaintPipeline.__call__)


class OmniStableDiffusionXLInstructPix2PixPipeline(StableDiffusionXLTextParts, StableDiffusionXLInstructPix2PixPipeline):
    """`StableDiffusionXLInstructPix2PixPipeline` that owns its offloading; the VAE runs before the UNet too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vae": ("encode", "decode"), "": ("encode_prompt",)}

    __call__ = casting_back(StableDiffusionXLInstructPix2PixPipeline.__call__)


class OmniStableDiffusionXLAdapterPipeline(StableDiffusionXLParts, StableDiffusionXLAdapterPipeline):
    """`StableDiffusionXLAdapterPipeline` that owns its offloading; the adapter runs once, for all steps."""

    _encoder_modules: ClassVar[list[str]] = [*ENCODERS, "image_encoder", "adapter"]

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of adapters is the instance's
        return with_adapter(PLAN, self.adapter)

    __call__ = casting_back(StableDiffusionXLAdapterPipeline.__call__)
