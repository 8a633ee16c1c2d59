"""SkyReels V2 pipelines that own their offloading: they are made of Wan's parts."""

from typing import ClassVar

import attrs
from diffusers import (
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2DiffusionForcingVideoToVideoPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
)

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.wan.parts import PLAN, WanParts, WanPictureParts

__all__ = [
    "OmniSkyReelsV2DiffusionForcingImageToVideoPipeline",
    "OmniSkyReelsV2DiffusionForcingPipeline",
    "OmniSkyReelsV2DiffusionForcingVideoToVideoPipeline",
    "OmniSkyReelsV2ImageToVideoPipeline",
    "OmniSkyReelsV2Pipeline",
]


class OmniSkyReelsV2Pipeline(WanParts, SkyReelsV2Pipeline):
    """`SkyReelsV2Pipeline` that owns its offloading."""

    __call__ = leaving_nothing(SkyReelsV2Pipeline.__call__)


class OmniSkyReelsV2ImageToVideoPipeline(WanPictureParts, SkyReelsV2ImageToVideoPipeline):
    """`SkyReelsV2ImageToVideoPipeline` that owns its offloading; its image encoder is a CLIP with a projection."""

    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        PLAN, encoder_block_attrs={**PLAN.encoder_block_attrs, "image_encoder": ("vision_model.encoder.layers",)}
    )
    __call__ = leaving_nothing(SkyReelsV2ImageToVideoPipeline.__call__)


class OmniSkyReelsV2DiffusionForcingPipeline(WanParts, SkyReelsV2DiffusionForcingPipeline):
    """`SkyReelsV2DiffusionForcingPipeline` that owns its offloading; a long video is made in windows, each by a whole run."""

    __call__ = leaving_nothing(SkyReelsV2DiffusionForcingPipeline.__call__)


class OmniSkyReelsV2DiffusionForcingImageToVideoPipeline(WanParts, SkyReelsV2DiffusionForcingImageToVideoPipeline):
    """`SkyReelsV2DiffusionForcingImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""

    __call__ = leaving_nothing(SkyReelsV2DiffusionForcingImageToVideoPipeline.__call__)


class OmniSkyReelsV2DiffusionForcingVideoToVideoPipeline(WanParts, SkyReelsV2DiffusionForcingVideoToVideoPipeline):
    """`SkyReelsV2DiffusionForcingVideoToVideoPipeline` that owns its offloading; the VAE encodes the end of the video to go on with."""

    __call__ = leaving_nothing(SkyReelsV2DiffusionForcingVideoToVideoPipeline.__call__)
