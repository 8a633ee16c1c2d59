"""Stable Diffusion XL pipelines that own their offloading: from text, and from a picture."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniStableDiffusionXLImg2ImgPipeline", "OmniStableDiffusionXLPipeline"]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "vae": ("encode", "decode"),
    "": ("encode_prompt", "encode_image", "prepare_ip_adapter_image_embeds"),
}


class _StableDiffusionXLParts(OmniOffloadMixin):
    """The components of a Stable Diffusion XL pipeline.

    With a negative prompt the two text encoders run in turn, twice each, so that they are on the device together.
    `image_encoder` is there for an IP-Adapter only.
    """

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "image_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("text_encoder", "text_encoder_2")]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")},
        encoder_block_attrs={
            "text_encoder": ("encoder.layers",),
            "text_encoder_2": ("text_model.encoder.layers",),
            "image_encoder": ("vision_model.encoder.layers",),
        },
    )

    vae: Any

    def upcast_vae(self) -> None:
        """Cast the VAE to float32, as upstream does in a call in float16, without its warning that nobody else should."""
        self.vae.to(dtype=torch.float32)


class OmniStableDiffusionXLPipeline(_StableDiffusionXLParts, StableDiffusionXLPipeline):
    """`StableDiffusionXLPipeline` that owns its offloading.

    In float16 a call casts the VAE to float32 before it decodes, where the VAE's configuration asks for it, and back.
    """

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS

    @functools.wraps(StableDiffusionXLPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; after an error the VAE has the type that it had before, and not the one that it decodes in."""
        vae, dtype = self.vae, self.vae.dtype
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            if dtype is torch.float16:  # the only type that is left
                vae.to(dtype)
            raise


class OmniStableDiffusionXLImg2ImgPipeline(_StableDiffusionXLParts, StableDiffusionXLImg2ImgPipeline):
    """`StableDiffusionXLImg2ImgPipeline` that owns its offloading; the VAE runs before the UNet too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS

    @functools.wraps(StableDiffusionXLImg2ImgPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; after an error the VAE has the type that it had before, and not the one that it decodes in."""
        vae, dtype = self.vae, self.vae.dtype
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            if dtype is torch.float16:  # the only type that is left
                vae.to(dtype)
            raise
