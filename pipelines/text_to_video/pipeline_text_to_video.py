"""Pipelines with three-dimensional UNets that own their offloading: from text, from a video, from a picture."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from diffusers import I2VGenXLPipeline, TextToVideoSDPipeline, VideoToVideoSDPipeline

from omni_offload import OffloadPlan
from pipelines.stable_diffusion.parts import PLAN, StableDiffusionParts

__all__ = ["OmniI2VGenXLPipeline", "OmniTextToVideoSDPipeline", "OmniVideoToVideoSDPipeline"]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {"vae": ("encode", "decode"), "": ("encode_prompt", "decode_latents")}


class _TextToVideoParts(StableDiffusionParts):
    """The components of a pipeline that sees text only. After the first convolution the UNet runs layers for time, of the rest."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(PLAN, encoder_block_attrs={"text_encoder": ("encoder.layers",)})
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS


class OmniTextToVideoSDPipeline(_TextToVideoParts, TextToVideoSDPipeline):
    """`TextToVideoSDPipeline` that owns its offloading."""


class OmniVideoToVideoSDPipeline(_TextToVideoParts, VideoToVideoSDPipeline):
    """`VideoToVideoSDPipeline` that owns its offloading; the VAE encodes the video to begin with."""


class OmniI2VGenXLPipeline(StableDiffusionParts, I2VGenXLPipeline):
    """`I2VGenXLPipeline` that owns its offloading; image encoder and VAE encode the picture."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        PLAN, encoder_block_attrs={name: PLAN.encoder_block_attrs[name] for name in ("text_encoder", "image_encoder")}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS

    @functools.wraps(I2VGenXLPipeline.encode_prompt)
    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # upstream's takes other arguments
        """Encode prompts, as all parts do, with the arguments of this pipeline."""
        return super().encode_prompt(*args, **kwargs)
