"""LTX-Video pipelines that own their offloading.

They read the VAE's `latents_mean` and `latents_std` by themselves, before it decodes and after it has encoded: these are on the host
then, and the pipelines copy them to where the latents are.
"""

from typing import ClassVar

from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXLatentUpsamplePipeline, LTXPipeline

from omni_offload import OffloadPlan
from pipelines.ltx.parts import LatentUpsampleParts
from pipelines.parts import T5_PLAN, TransformerParts

__all__ = ["OmniLTXConditionPipeline", "OmniLTXImageToVideoPipeline", "OmniLTXLatentUpsamplePipeline", "OmniLTXPipeline"]


class _LTXParts(TransformerParts):
    """The components of an LTX-Video pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN


class OmniLTXPipeline(_LTXParts, LTXPipeline):
    """`LTXPipeline` that owns its offloading."""


class OmniLTXImageToVideoPipeline(_LTXParts, LTXImageToVideoPipeline):
    """`LTXImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""


class OmniLTXConditionPipeline(_LTXParts, LTXConditionPipeline):
    """`LTXConditionPipeline` that owns its offloading; the VAE encodes each picture and video that is to be among the frames."""


class OmniLTXLatentUpsamplePipeline(LatentUpsampleParts, LTXLatentUpsamplePipeline):
    """`LTXLatentUpsamplePipeline` that owns its offloading."""
