"""Stable Cascade pipelines that own their offloading: the prior, the decoder, and both together."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import StableCascadeCombinedPipeline, StableCascadeDecoderPipeline, StableCascadePriorPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin
from pipelines.combined import running_inner

__all__ = ["OmniStableCascadeCombinedPipeline", "OmniStableCascadeDecoderPipeline", "OmniStableCascadePriorPipeline"]

_LEVELS = ("down_blocks", "up_blocks")
"""Lists of lists of blocks; a level runs several times in a row, if the model says so."""

_TEXT_BLOCKS = ("text_model.encoder.layers",)
_IMAGE_BLOCKS = ("vision_model.encoder.layers",)


class OmniStableCascadePriorPipeline(OmniOffloadMixin, StableCascadePriorPipeline):
    """`StableCascadePriorPipeline` that owns its offloading; `image_encoder` is for image prompts, and may be None."""

    _dit_modules: ClassVar[list[str]] = ["prior"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _vae_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"prior": _LEVELS}, encoder_block_attrs={"text_encoder": _TEXT_BLOCKS, "image_encoder": _IMAGE_BLOCKS}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"": ("encode_prompt", "encode_image")}


class OmniStableCascadeDecoderPipeline(OmniOffloadMixin, StableCascadeDecoderPipeline):
    """`StableCascadeDecoderPipeline` that owns its offloading."""

    _dit_modules: ClassVar[list[str]] = ["decoder"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vqgan"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs={"decoder": _LEVELS}, encoder_block_attrs={"text_encoder": _TEXT_BLOCKS})
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vqgan": ("encode", "decode"), "": ("encode_prompt",)}


class OmniStableCascadeCombinedPipeline(OmniOffloadMixin, StableCascadeCombinedPipeline):
    """`StableCascadeCombinedPipeline` that owns its offloading: a prior and a decoder, which may have one text encoder for both."""

    _dit_modules: ClassVar[list[str]] = ["prior_prior", "decoder"]
    _encoder_modules: ClassVar[list[str]] = ["prior_text_encoder", "prior_image_encoder", "text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vqgan"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"prior_prior": _LEVELS, "decoder": _LEVELS},
        encoder_block_attrs={
            "prior_text_encoder": _TEXT_BLOCKS,
            "prior_image_encoder": _IMAGE_BLOCKS,
            "text_encoder": _TEXT_BLOCKS,
        },
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vqgan": ("encode", "decode")}
    __call__ = running_inner(StableCascadeCombinedPipeline.__call__, {"prior_pipe": "prior_", "decoder_pipe": ""})
