"""Wan pipelines that own their offloading: from text, from a video, editing a video, by a video that controls."""

from typing import ClassVar

import attrs
from diffusers import LucyEditPipeline, WanPipeline, WanVACEPipeline, WanVideoToVideoPipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.wan.parts import PLAN_OF_TWO, WanParts, WanPartsOfTwo

__all__ = ["OmniLucyEditPipeline", "OmniWanPipeline", "OmniWanVACEPipeline", "OmniWanVideoToVideoPipeline"]

_CONTROLLED = ("vace_blocks", "blocks")
"""The blocks that see the control video run first, all of them."""


class OmniWanPipeline(WanPartsOfTwo, WanPipeline):
    """`WanPipeline` that owns its offloading; Wan 2.1 and Wan 2.2's small model have one DiT, Wan 2.2 has two."""

    __call__ = leaving_nothing(WanPipeline.__call__)


class OmniLucyEditPipeline(WanPartsOfTwo, LucyEditPipeline):
    """`LucyEditPipeline` that owns its offloading; the VAE encodes the video to edit before the DiTs run."""

    __call__ = leaving_nothing(LucyEditPipeline.__call__)


class OmniWanVACEPipeline(WanPartsOfTwo, WanVACEPipeline):
    """`WanVACEPipeline` that owns its offloading; the VAE encodes the control video, twice where there is a mask."""

    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(PLAN_OF_TWO, block_attrs=dict.fromkeys(PLAN_OF_TWO.block_attrs, _CONTROLLED))
    __call__ = leaving_nothing(WanVACEPipeline.__call__)


class OmniWanVideoToVideoPipeline(WanParts, WanVideoToVideoPipeline):
    """`WanVideoToVideoPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = leaving_nothing(WanVideoToVideoPipeline.__call__)
