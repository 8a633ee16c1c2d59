"""LTX-Video pipelines that own their offloading.

They read the VAE's `latents_mean` and `latents_std` by themselves, before it decodes and after it has encoded: these are on the host
then, and the pipelines copy them to where the latents are.
"""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    LTXConditionPipeline,
    LTXI2VLongMultiPromptPipeline,
    LTXImageToVideoPipeline,
    LTXLatentUpsamplePipeline,
    LTXPipeline,
)

from omni_offload import OffloadPlan
from pipelines.ltx.parts import LatentUpsampleParts
from pipelines.parts import ENTRY_POINTS, T5_PLAN, TransformerParts

__all__ = [
    "OmniLTXConditionPipeline",
    "OmniLTXI2VLongMultiPromptPipeline",
    "OmniLTXImageToVideoPipeline",
    "OmniLTXLatentUpsamplePipeline",
    "OmniLTXPipeline",
]


class _LTXParts(TransformerParts):
    """The components of an LTX-Video pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN


class OmniLTXPipeline(_LTXParts, LTXPipeline):
    """`LTXPipeline` that owns its offloading."""


class OmniLTXImageToVideoPipeline(_LTXParts, LTXImageToVideoPipeline):
    """`LTXImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""


class OmniLTXConditionPipeline(_LTXParts, LTXConditionPipeline):
    """`LTXConditionPipeline` that owns its offloading; the VAE encodes each picture and video that is to be among the frames."""


class OmniLTXI2VLongMultiPromptPipeline(_LTXParts, LTXI2VLongMultiPromptPipeline):
    """`LTXI2VLongMultiPromptPipeline` that owns its offloading; the text encoder runs before the DiT in every window."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {**ENTRY_POINTS, "": (*ENTRY_POINTS[""], "vae_decode_tiled")}


class OmniLTXLatentUpsamplePipeline(LatentUpsampleParts, LTXLatentUpsamplePipeline):
    """`LTXLatentUpsamplePipeline` that owns its offloading."""
