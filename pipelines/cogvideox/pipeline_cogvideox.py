"""CogVideoX pipelines that own their offloading; they differ in what the VAE encodes before the DiT runs."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXVideoToVideoPipeline,
)

from omni_offload import OffloadPlan
from pipelines.parts import ENTRY_POINTS, T5_PLAN, TransformerParts

__all__ = [
    "OmniCogVideoXFunControlPipeline",
    "OmniCogVideoXImageToVideoPipeline",
    "OmniCogVideoXPipeline",
    "OmniCogVideoXVideoToVideoPipeline",
]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {**ENTRY_POINTS, "": ("encode_prompt", "decode_latents")}


class _CogVideoXParts(TransformerParts):
    """The components of a CogVideoX pipeline. The VAE enters its halves once for each few frames: its whole methods are the work."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS


class OmniCogVideoXPipeline(_CogVideoXParts, CogVideoXPipeline):
    """`CogVideoXPipeline` that owns its offloading."""


class OmniCogVideoXImageToVideoPipeline(_CogVideoXParts, CogVideoXImageToVideoPipeline):
    """`CogVideoXImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""


class OmniCogVideoXVideoToVideoPipeline(_CogVideoXParts, CogVideoXVideoToVideoPipeline):
    """`CogVideoXVideoToVideoPipeline` that owns its offloading; the VAE encodes the video to begin with."""


class OmniCogVideoXFunControlPipeline(_CogVideoXParts, CogVideoXFunControlPipeline):
    """`CogVideoXFunControlPipeline` that owns its offloading; the VAE encodes the video that controls."""
