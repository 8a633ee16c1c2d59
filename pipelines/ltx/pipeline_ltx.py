"""LTX-Video pipelines that own their offloading.

They read the VAE's `latents_mean` and `latents_std` by themselves, before it decodes and after it has encoded: these are on the host
then, and the pipelines copy them to where the latents are.
"""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXLatentUpsamplePipeline, LTXPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin
from pipelines.parts import T5_PLAN, TransformerParts

__all__ = ["OmniLTXConditionPipeline", "OmniLTXImageToVideoPipeline", "OmniLTXLatentUpsamplePipeline", "OmniLTXPipeline"]


class _LTXParts(TransformerParts):
    """The components of an LTX-Video pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN


class OmniLTXPipeline(_LTXParts, LTXPipeline):
    """`LTXPipeline` that owns its offloading."""


class OmniLTXImageToVideoPipeline(_LTXParts, LTXImageToVideoPipeline):
    """`LTXImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""


class OmniLTXConditionPipeline(_LTXParts, LTXConditionPipeline):
    """`LTXConditionPipeline` that owns its offloading; the VAE encodes each picture and video that is to be among the frames."""


class OmniLTXLatentUpsamplePipeline(OmniOffloadMixin, LTXLatentUpsamplePipeline):
    """`LTXLatentUpsamplePipeline` that owns its offloading; the model that enlarges latents is its DiT."""

    _dit_modules: ClassVar[list[str]] = ["latent_upsampler"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs={"latent_upsampler": ("res_blocks", "post_upsample_res_blocks")})
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vae": ("encode", "decode")}
