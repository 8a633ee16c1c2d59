"""`OmniStableVideoDiffusionPipeline`: declares what a Stable Video Diffusion pipeline is made of, and inherits the rest."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import StableVideoDiffusionPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

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

    @functools.wraps(StableVideoDiffusionPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; after an error the VAE has the type that it had before, and not the one that it encodes in."""
        vae, dtype = self.vae, self.vae.dtype
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            if dtype is torch.float16:  # the only type that is left
                vae.to(dtype)
            raise
