"""Chroma pipelines that own their offloading: from text, from a picture, into a masked picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import ChromaImg2ImgPipeline, ChromaInpaintPipeline, ChromaPipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniChromaImg2ImgPipeline", "OmniChromaInpaintPipeline", "OmniChromaPipeline"]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "vae": ("encode", "decode"),
    "": ("encode_prompt", "encode_image", "prepare_ip_adapter_image_embeds"),
}


class _ChromaParts(TransformerParts):
    """The components of a Chroma pipeline; `image_encoder` is there for an IP-Adapter only, and is None otherwise."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("distilled_guidance_layer.layers", "transformer_blocks", "single_transformer_blocks")},
        encoder_block_attrs={"text_encoder": ("encoder.block",), "image_encoder": ("vision_model.encoder.layers",)},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS


class OmniChromaPipeline(_ChromaParts, ChromaPipeline):
    """`ChromaPipeline` that owns its offloading."""


class OmniChromaImg2ImgPipeline(_ChromaParts, ChromaImg2ImgPipeline):
    """`ChromaImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""


class OmniChromaInpaintPipeline(_ChromaParts, ChromaInpaintPipeline):
    """`ChromaInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""
