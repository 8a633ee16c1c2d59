"""Amused pipelines that own their offloading: from text, from a picture, into a masked picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import AmusedImg2ImgPipeline, AmusedInpaintPipeline, AmusedPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniAmusedImg2ImgPipeline", "OmniAmusedInpaintPipeline", "OmniAmusedPipeline"]


class _AmusedParts(OmniOffloadMixin):
    """The components of an Amused pipeline.

    Where there is a picture to begin with, the pipeline itself calls the quantizer in the autoencoder.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vqvae"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("down_block", "transformer_layers", "up_block")},
        encoder_block_attrs={"text_encoder": ("text_model.encoder.layers",)},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vqvae": ("encode", "decode"),
        "vqvae.quantize": ("forward",),
    }


class OmniAmusedPipeline(_AmusedParts, AmusedPipeline):
    """`AmusedPipeline` that owns its offloading."""


class OmniAmusedImg2ImgPipeline(_AmusedParts, AmusedImg2ImgPipeline):
    """`AmusedImg2ImgPipeline` that owns its offloading; the autoencoder runs before the transformer too."""


class OmniAmusedInpaintPipeline(_AmusedParts, AmusedInpaintPipeline):
    """`AmusedInpaintPipeline` that owns its offloading; the autoencoder runs before the transformer too."""
