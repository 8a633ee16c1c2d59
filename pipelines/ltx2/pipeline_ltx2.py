"""LTX-2 pipelines that own their offloading: from text, from pictures and videos among the frames, and larger ones from latents."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    LTX2ConditionPipeline,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2LatentUpsamplePipeline,
    LTX2Pipeline,
)

from omni_offload import OffloadPlan
from pipelines.ltx.parts import LatentUpsampleParts
from pipelines.ltx2.parts import ENTRY_POINTS, LTX2Parts, plan_for

__all__ = [
    "OmniLTX2ConditionPipeline",
    "OmniLTX2ImageToVideoPipeline",
    "OmniLTX2InContextPipeline",
    "OmniLTX2LatentUpsamplePipeline",
    "OmniLTX2Pipeline",
]

_ENCODERS = ("text_encoder", "prompt_enhancer", "connectors", "duration_head")
_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {**ENTRY_POINTS, "duration_head": ("predict_num_frames",)}


class _TimedParts(LTX2Parts):
    """The components of a pipeline that can choose the number of frames; `duration_head`, which does it, may be None."""

    _encoder_modules: ClassVar[list[str]] = list(_ENCODERS)
    _offload_plan: ClassVar[OffloadPlan] = plan_for(*_ENCODERS)
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS


class OmniLTX2Pipeline(_TimedParts, LTX2Pipeline):
    """`LTX2Pipeline` that owns its offloading."""


class OmniLTX2ImageToVideoPipeline(_TimedParts, LTX2ImageToVideoPipeline):
    """`LTX2ImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""


class OmniLTX2ConditionPipeline(_TimedParts, LTX2ConditionPipeline):
    """`LTX2ConditionPipeline` that owns its offloading; the VAE encodes each picture and video that is to be among the frames."""


class OmniLTX2InContextPipeline(LTX2Parts, LTX2InContextPipeline):
    """`LTX2InContextPipeline` that owns its offloading; the VAE encodes the videos that an adapter of the DiT refers to."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniLTX2LatentUpsamplePipeline(LatentUpsampleParts, LTX2LatentUpsamplePipeline):
    """`LTX2LatentUpsamplePipeline` that owns its offloading."""
