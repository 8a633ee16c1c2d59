"""`OmniStableAudioPipeline`: declares what a Stable Audio pipeline is made of, and inherits the rest."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import StableAudioPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniStableAudioPipeline"]


class OmniStableAudioPipeline(OmniOffloadMixin, StableAudioPipeline):
    """`StableAudioPipeline` that owns its offloading.

    Text encoder and projection run once each for the prompts, and the projection once more for the times; the VAE encodes only
    where there is a sound to begin with. Its convolutions have the older kind of weight normalisation, which computes `weight`
    anew in every use: that is no weight to move, and none stays on the device.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "projection_model"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        encoder_block_attrs={"text_encoder": ("encoder.block",)},
        encoder_component_types={"projection_model": "text_encoder"},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "": ("encode_prompt", "encode_duration"),
    }
