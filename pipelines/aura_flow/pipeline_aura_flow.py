"""`OmniAuraFlowPipeline`: declares what an AuraFlow pipeline is made of, and inherits the rest."""

from typing import ClassVar

from diffusers import AuraFlowPipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniAuraFlowPipeline"]


class OmniAuraFlowPipeline(TransformerParts, AuraFlowPipeline):
    """`AuraFlowPipeline` that owns its offloading."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("joint_transformer_blocks", "single_transformer_blocks")},
        encoder_block_attrs={"text_encoder": ("encoder.block",)},
    )
