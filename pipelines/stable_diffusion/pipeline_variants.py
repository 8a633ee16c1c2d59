"""Pipelines over the components of Stable Diffusion: adapters, few steps, wide pictures, depth, phrases in boxes."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    LatentConsistencyModelImg2ImgPipeline,
    LatentConsistencyModelPipeline,
    StableDiffusionAdapterPipeline,
    StableDiffusionGLIGENPipeline,
    StableDiffusionLDM3DPipeline,
    StableDiffusionPanoramaPipeline,
)

from omni_offload import OffloadPlan
from pipelines.parts import with_adapter
from pipelines.stable_diffusion.parts import ENTRY_POINTS, StableDiffusionParts, plan_without

__all__ = [
    "OmniLatentConsistencyModelImg2ImgPipeline",
    "OmniLatentConsistencyModelPipeline",
    "OmniStableDiffusionAdapterPipeline",
    "OmniStableDiffusionGLIGENPipeline",
    "OmniStableDiffusionLDM3DPipeline",
    "OmniStableDiffusionPanoramaPipeline",
]

_PROMPTS: Mapping[str, tuple[str, ...]] = {**ENTRY_POINTS, "": ("encode_prompt",)}


class OmniStableDiffusionAdapterPipeline(StableDiffusionParts, StableDiffusionAdapterPipeline):
    """`StableDiffusionAdapterPipeline` that owns its offloading: the adapter runs once, for all steps.

    Several adapters are one component, and run one after the other.
    """

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "adapter", "safety_checker"]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _PROMPTS

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of adapters is the instance's
        return with_adapter(plan_without("image_encoder"), self.adapter)


class OmniLatentConsistencyModelPipeline(StableDiffusionParts, LatentConsistencyModelPipeline):
    """`LatentConsistencyModelPipeline` that owns its offloading."""


class OmniLatentConsistencyModelImg2ImgPipeline(StableDiffusionParts, LatentConsistencyModelImg2ImgPipeline):
    """`LatentConsistencyModelImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""


class OmniStableDiffusionPanoramaPipeline(StableDiffusionParts, StableDiffusionPanoramaPipeline):
    """`StableDiffusionPanoramaPipeline` that owns its offloading; the UNet runs once a view and step."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ENTRY_POINTS,
        "": (*ENTRY_POINTS[""], "decode_latents_with_padding"),
    }


class OmniStableDiffusionLDM3DPipeline(StableDiffusionParts, StableDiffusionLDM3DPipeline):
    """`StableDiffusionLDM3DPipeline` that owns its offloading; the VAE decodes a picture and its depth."""


class OmniStableDiffusionGLIGENPipeline(StableDiffusionParts, StableDiffusionGLIGENPipeline):
    """`StableDiffusionGLIGENPipeline` that owns its offloading; the text encoder runs for the phrases too."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "safety_checker"]
    _offload_plan: ClassVar[OffloadPlan] = plan_without("image_encoder")
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _PROMPTS
