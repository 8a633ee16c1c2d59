"""AnimateDiff pipelines that own their offloading: from text, from a video, from a picture, and with perturbed attention."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import AnimateDiffPAGPipeline, AnimateDiffPipeline, AnimateDiffVideoToVideoPipeline, PIAPipeline

from pipelines.animatediff.parts import AnimateDiffParts
from pipelines.leftovers import keeping_attention
from pipelines.stable_diffusion.parts import ENTRY_POINTS as STABLE_DIFFUSION_ENTRY_POINTS

__all__ = [
    "ENTRY_POINTS",
    "ENTRY_POINTS_WITH_VIDEO",
    "OmniAnimateDiffPAGPipeline",
    "OmniAnimateDiffPipeline",
    "OmniAnimateDiffVideoToVideoPipeline",
    "OmniPIAPipeline",
]

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    **STABLE_DIFFUSION_ENTRY_POINTS,
    "": (*STABLE_DIFFUSION_ENTRY_POINTS[""], "decode_latents"),
}
ENTRY_POINTS_WITH_VIDEO: Mapping[str, tuple[str, ...]] = {**ENTRY_POINTS, "": (*ENTRY_POINTS[""], "encode_video")}


class OmniAnimateDiffPipeline(AnimateDiffParts, AnimateDiffPipeline):
    """`AnimateDiffPipeline` that owns its offloading; the VAE decodes the frames in chunks."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniAnimateDiffPAGPipeline(AnimateDiffParts, AnimateDiffPAGPipeline):
    """`AnimateDiffPAGPipeline` that owns its offloading; for guidance the attention of some blocks runs in two ways."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
    __call__ = keeping_attention(AnimateDiffPAGPipeline.__call__, "unet")


class OmniAnimateDiffVideoToVideoPipeline(AnimateDiffParts, AnimateDiffVideoToVideoPipeline):
    """`AnimateDiffVideoToVideoPipeline` that owns its offloading; the VAE encodes the video to begin with."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS_WITH_VIDEO


class OmniPIAPipeline(AnimateDiffParts, PIAPipeline):
    """`PIAPipeline` that owns its offloading; the VAE encodes the picture to animate."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
