"""DeepFloyd IF pipelines that own their offloading: from text, from a picture, into a masked picture, each in two stages."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    IFImg2ImgPipeline,
    IFImg2ImgSuperResolutionPipeline,
    IFInpaintingPipeline,
    IFInpaintingSuperResolutionPipeline,
    IFPipeline,
    IFSuperResolutionPipeline,
)

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = [
    "OmniIFImg2ImgPipeline",
    "OmniIFImg2ImgSuperResolutionPipeline",
    "OmniIFInpaintingPipeline",
    "OmniIFInpaintingSuperResolutionPipeline",
    "OmniIFPipeline",
    "OmniIFSuperResolutionPipeline",
]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {"watermarker": ("apply_watermark",), "": ("encode_prompt",)}


class _IFParts(OmniOffloadMixin):
    """The components of a DeepFloyd IF pipeline: no VAE, as the UNet works on pixels.

    All but the UNet may be None. Safety checker and watermarker see the finished pictures; the watermarker's one buffer is read on
    the host, once.
    """

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "safety_checker", "watermarker"]
    _vae_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")},
        encoder_block_attrs={
            "text_encoder": ("encoder.block",),
            "safety_checker": ("vision_model.vision_model.encoder.layers",),
        },
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS


class OmniIFPipeline(_IFParts, IFPipeline):
    """`IFPipeline` that owns its offloading."""


class OmniIFSuperResolutionPipeline(_IFParts, IFSuperResolutionPipeline):
    """`IFSuperResolutionPipeline` that owns its offloading."""


class OmniIFImg2ImgPipeline(_IFParts, IFImg2ImgPipeline):
    """`IFImg2ImgPipeline` that owns its offloading."""


class OmniIFImg2ImgSuperResolutionPipeline(_IFParts, IFImg2ImgSuperResolutionPipeline):
    """`IFImg2ImgSuperResolutionPipeline` that owns its offloading."""


class OmniIFInpaintingPipeline(_IFParts, IFInpaintingPipeline):
    """`IFInpaintingPipeline` that owns its offloading."""


class OmniIFInpaintingSuperResolutionPipeline(_IFParts, IFInpaintingSuperResolutionPipeline):
    """`IFInpaintingSuperResolutionPipeline` that owns its offloading."""
