"""Stable Diffusion with a picture that is no mere beginning: its depth, an instruction for it, a larger one, one like it."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from diffusers import (
    StableDiffusionDepth2ImgPipeline,
    StableDiffusionImageVariationPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionLatentUpscalePipeline,
    StableDiffusionUpscalePipeline,
)

from omni_offload import OffloadPlan
from pipelines.stable_diffusion.parts import ENTRY_POINTS, PLAN, StableDiffusionComponents, StableDiffusionParts, plan_without

__all__ = [
    "OmniStableDiffusionDepth2ImgPipeline",
    "OmniStableDiffusionImageVariationPipeline",
    "OmniStableDiffusionInstructPix2PixPipeline",
    "OmniStableDiffusionLatentUpscalePipeline",
    "OmniStableDiffusionUpscalePipeline",
]

_VAE: Mapping[str, tuple[str, ...]] = {"vae": ("encode", "decode")}
_DEPTH_BLOCKS = (
    "dpt.encoder.layer",
    "neck.reassemble_stage.readout_projects",
    "neck.reassemble_stage.layers",
    "neck.fusion_stage.layers",
)
_PROMPTS: Mapping[str, tuple[str, ...]] = {**_VAE, "": ("encode_prompt",)}


class OmniStableDiffusionDepth2ImgPipeline(StableDiffusionParts, StableDiffusionDepth2ImgPipeline):
    """`StableDiffusionDepth2ImgPipeline` that owns its offloading; the depth estimator looks at the picture first."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "depth_estimator"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        PLAN, encoder_block_attrs={"text_encoder": ("encoder.layers",), "depth_estimator": _DEPTH_BLOCKS}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _PROMPTS


class OmniStableDiffusionInstructPix2PixPipeline(StableDiffusionComponents, StableDiffusionInstructPix2PixPipeline):
    """`StableDiffusionInstructPix2PixPipeline` that owns its offloading; the VAE runs before the UNet too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ENTRY_POINTS,
        "": ("encode_image", "prepare_ip_adapter_image_embeds"),
    }


class OmniStableDiffusionUpscalePipeline(StableDiffusionParts, StableDiffusionUpscalePipeline):
    """`StableDiffusionUpscalePipeline` that owns its offloading; the UNet sees the smaller picture itself.

    The watermarker may be None, as may the safety checker.
    """

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "safety_checker", "watermarker"]
    _offload_plan: ClassVar[OffloadPlan] = plan_without("image_encoder")
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {**_PROMPTS, "watermarker": ("apply_watermark",)}


class OmniStableDiffusionLatentUpscalePipeline(StableDiffusionComponents, StableDiffusionLatentUpscalePipeline):
    """`StableDiffusionLatentUpscalePipeline` that owns its offloading; its UNet has no middle block."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"unet": ("down_blocks", "up_blocks")}, encoder_block_attrs={"text_encoder": ("encoder.layers",)}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _PROMPTS


class OmniStableDiffusionImageVariationPipeline(StableDiffusionComponents, StableDiffusionImageVariationPipeline):
    """`StableDiffusionImageVariationPipeline` that owns its offloading; an image encoder stands in for the text encoder."""

    _encoder_modules: ClassVar[list[str]] = ["image_encoder", "safety_checker"]
    _offload_plan: ClassVar[OffloadPlan] = plan_without("text_encoder")
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _VAE
