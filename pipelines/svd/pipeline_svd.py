"""`OmniStableVideoDiffusionPipeline`: declares what a Stable Video Diffusion pipeline is made of, and inherits the rest."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import StableVideoDiffusionPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin
from pipelines.leftovers import casting_back

__all__ = ["OmniStableVideoDiffusionPipeline"]


class OmniStableVideoDiffusionPipeline(OmniOffloadMixin, StableVideoDiffusionPipeline):
    """`StableVideoDiffusionPipeline` that owns its offloading.

    The VAE encodes the picture, in float32 where its configuration asks for it in float16, and decodes the frames in chunks.
    """

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["image_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")},
        encoder_block_attrs={"image_encoder": ("vision_model.encoder.layers",)},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vae": ("encode", "decode"), "": ("decode_latents",)}

    __call__ = casting_back(StableVideoDiffusionPipeline.__call__)
