"""Lumina pipelines that own their offloading."""

from typing import ClassVar

from diffusers import Lumina2Pipeline, LuminaPipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniLumina2Pipeline", "OmniLuminaPipeline"]

_ENCODER_BLOCKS = {"text_encoder": ("layers",)}


class OmniLumina2Pipeline(TransformerParts, Lumina2Pipeline):
    """`Lumina2Pipeline` that owns its offloading.

    The DiT refines the text before the noise, though it registers the two refiners the other way round.
    """

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("context_refiner", "noise_refiner", "layers")}, encoder_block_attrs=_ENCODER_BLOCKS
    )


class OmniLuminaPipeline(TransformerParts, LuminaPipeline):
    """`LuminaPipeline` that owns its offloading."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs={"transformer": ("layers",)}, encoder_block_attrs=_ENCODER_BLOCKS)
