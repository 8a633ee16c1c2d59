"""Stable Audio 3 pipelines that own their offloading: from text, from a sound, and into a part of a sound."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import StableAudio3AudioToAudioPipeline, StableAudio3InpaintPipeline, StableAudio3Pipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniStableAudio3AudioToAudioPipeline", "OmniStableAudio3InpaintPipeline", "OmniStableAudio3Pipeline"]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {"vae": ("encode", "decode"), "": ("encode_prompt", "encode_duration")}


class _StableAudio3Parts(TransformerParts):
    """The components of a Stable Audio 3 pipeline. The autoencoder reads the deviation of its latents itself, in its methods."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "duration_embedder"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        encoder_block_attrs={"text_encoder": ("encoder.layers",)},
        encoder_component_types={"duration_embedder": "text_encoder"},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS


class OmniStableAudio3Pipeline(_StableAudio3Parts, StableAudio3Pipeline):
    """`StableAudio3Pipeline` that owns its offloading."""


class OmniStableAudio3AudioToAudioPipeline(_StableAudio3Parts, StableAudio3AudioToAudioPipeline):
    """`StableAudio3AudioToAudioPipeline` that owns its offloading; the autoencoder encodes the sound to begin with."""


class OmniStableAudio3InpaintPipeline(_StableAudio3Parts, StableAudio3InpaintPipeline):
    """`StableAudio3InpaintPipeline` that owns its offloading; the autoencoder encodes the sound, a part of which is kept."""
