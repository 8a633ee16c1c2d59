"""What many families have in common: one text encoder, one DiT and one VAE."""

from collections.abc import Mapping
from typing import ClassVar

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["ENTRY_POINTS", "T5_PLAN", "TransformerParts"]

T5_PLAN = OffloadPlan(
    block_attrs={"transformer": ("transformer_blocks",)},
    encoder_block_attrs={"text_encoder": ("encoder.block",)},
)
"""For a DiT with one list of blocks, after a T5 encoder."""

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {"vae": ("encode", "decode"), "": ("encode_prompt",)}


class TransformerParts(OmniOffloadMixin):
    """The components of a pipeline with one text encoder, one DiT and one VAE."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
