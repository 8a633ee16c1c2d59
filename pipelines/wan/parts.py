"""What Wan pipelines, and those that are made of the same parts, have in common."""

from collections.abc import Mapping
from typing import ClassVar

import attrs

from omni_offload import OffloadPlan
from pipelines.parts import ENTRY_POINTS, TransformerParts

__all__ = ["ENTRY_POINTS_WITH_PICTURE", "PLAN", "PLAN_OF_TWO", "WanParts", "WanPartsOfTwo", "WanPictureParts"]

PLAN = OffloadPlan(
    block_attrs={"transformer": ("blocks",)},
    encoder_block_attrs={"text_encoder": ("encoder.block",)},
    encoder_dlo_weight_replication={"text_encoder"},
)

PLAN_OF_TWO = attrs.evolve(PLAN, block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)})
"""For two DiTs that share the steps."""

ENTRY_POINTS_WITH_PICTURE: Mapping[str, tuple[str, ...]] = {**ENTRY_POINTS, "": ("encode_prompt", "encode_image")}


class WanParts(TransformerParts):
    """The components of a pipeline with one DiT. The VAE enters its halves once a latent frame: its whole methods are the work."""

    _offload_plan: ClassVar[OffloadPlan] = PLAN


class WanPartsOfTwo(WanParts):
    """The components of a pipeline with one DiT or two, of which `transformer` takes the noisy steps and `transformer_2` the others."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _offload_plan: ClassVar[OffloadPlan] = PLAN_OF_TWO


class WanPictureParts(WanParts):
    """The components of a pipeline with one DiT that sees a picture, encoded by CLIP too."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        PLAN, encoder_block_attrs={**PLAN.encoder_block_attrs, "image_encoder": ("encoder.layers",)}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS_WITH_PICTURE
