"""CogView pipelines that own their offloading."""

from typing import ClassVar

from diffusers import CogView3PlusPipeline, CogView4ControlPipeline, CogView4Pipeline

from omni_offload import OffloadPlan
from pipelines.parts import T5_PLAN, TransformerParts

__all__ = ["OmniCogView3PlusPipeline", "OmniCogView4ControlPipeline", "OmniCogView4Pipeline"]

_PLAN = OffloadPlan(block_attrs={"transformer": ("transformer_blocks",)}, encoder_block_attrs={"text_encoder": ("layers",)})


class OmniCogView4Pipeline(TransformerParts, CogView4Pipeline):
    """`CogView4Pipeline` that owns its offloading."""

    _offload_plan: ClassVar[OffloadPlan] = _PLAN


class OmniCogView4ControlPipeline(TransformerParts, CogView4ControlPipeline):
    """`CogView4ControlPipeline` that owns its offloading; the VAE encodes the control picture before the DiT runs."""

    _offload_plan: ClassVar[OffloadPlan] = _PLAN


class OmniCogView3PlusPipeline(TransformerParts, CogView3PlusPipeline):
    """`CogView3PlusPipeline` that owns its offloading."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN
