"""Kandinsky 2.2 priors that own their offloading: from text, and from text and a picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import KandinskyV22PriorEmb2EmbPipeline, KandinskyV22PriorPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniKandinskyV22PriorEmb2EmbPipeline", "OmniKandinskyV22PriorPipeline"]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {"prior": ("post_process_latents",), "": ("interpolate", "get_zero_embed")}


class _PriorParts(OmniOffloadMixin):
    """The components of a prior. The image encoder runs for pictures, and for an empty one in place of negative prompts."""

    _dit_modules: ClassVar[list[str]] = ["prior"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _vae_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"prior": ("transformer_blocks",)},
        encoder_block_attrs={
            "text_encoder": ("text_model.encoder.layers",),
            "image_encoder": ("vision_model.encoder.layers",),
        },
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS


class OmniKandinskyV22PriorPipeline(_PriorParts, KandinskyV22PriorPipeline):
    """`KandinskyV22PriorPipeline` that owns its offloading."""


class OmniKandinskyV22PriorEmb2EmbPipeline(_PriorParts, KandinskyV22PriorEmb2EmbPipeline):
    """`KandinskyV22PriorEmb2EmbPipeline` that owns its offloading."""
