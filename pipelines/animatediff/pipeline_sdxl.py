"""`OmniAnimateDiffSDXLPipeline`: declares what an AnimateDiff pipeline with a Stable Diffusion XL UNet is made of."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from diffusers import AnimateDiffSDXLPipeline

from omni_offload import OffloadPlan
from pipelines.animatediff.parts import ADAPTER_BLOCKS
from pipelines.leftovers import casting_back
from pipelines.sdxl.parts import ENTRY_POINTS, PLAN, StableDiffusionXLParts

__all__ = ["OmniAnimateDiffSDXLPipeline"]


class OmniAnimateDiffSDXLPipeline(StableDiffusionXLParts, AnimateDiffSDXLPipeline):
    """`AnimateDiffSDXLPipeline` that owns its offloading; `motion_adapter`, whose weights the UNet copies, never runs."""

    _dit_modules: ClassVar[list[str]] = ["unet", "motion_adapter"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(PLAN, block_attrs={**PLAN.block_attrs, "motion_adapter": ADAPTER_BLOCKS})
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {**ENTRY_POINTS, "": (*ENTRY_POINTS[""], "decode_latents")}
    __call__ = casting_back(AnimateDiffSDXLPipeline.__call__)
