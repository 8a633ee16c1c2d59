"""`OmniMochiPipeline`: declares what a Mochi pipeline is made of, and inherits the rest."""

from typing import ClassVar

from diffusers import MochiPipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.parts import T5_PLAN, TransformerParts

__all__ = ["OmniMochiPipeline"]


class OmniMochiPipeline(TransformerParts, MochiPipeline):
    """`MochiPipeline` that owns its offloading; its VAE never encodes."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN
    __call__ = leaving_nothing(MochiPipeline.__call__)
