"""Stable unCLIP: Stable Diffusion whose UNet also takes the embedding of a picture, which a prior makes of the text, or an encoder."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import attrs
import torch
from diffusers import StableUnCLIPImg2ImgPipeline, StableUnCLIPPipeline

from omni_offload import OffloadPlan
from pipelines.stable_diffusion.parts import PLAN, StableDiffusionParts, plan_without

__all__ = ["OmniStableUnCLIPImg2ImgPipeline", "OmniStableUnCLIPPipeline"]

_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "vae": ("encode", "decode"),
    "": ("encode_prompt", "noise_image_embeddings"),
}


class _UnCLIPParts(StableDiffusionParts):
    """The components of Stable unCLIP; the normalizer is a mean and a deviation of pictures' embeddings."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder", "image_normalizer"]
    _offload_plan: ClassVar[OffloadPlan] = plan_without("safety_checker")
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = _ENTRY_POINTS

    image_normalizer: Any

    @functools.wraps(StableUnCLIPPipeline.noise_image_embeddings)
    def noise_image_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Add noise to embeddings of pictures.

        Upstream brings the normalizer to their device first, with new parameters in place of its own. While offload is enabled it is
        there, and keeps them.
        """
        there = contextlib.nullcontext() if self.offload_backend is None else _staying(self.image_normalizer)
        with self.on_device("image_normalizer"), there:
            return super().noise_image_embeddings(*args, **kwargs)  # type: ignore[misc]  # of the pipeline behind the parts


@contextlib.contextmanager
def _staying(module: Any) -> Iterator[None]:
    """Let `to` of a module do nothing where it is given a device; it casts as before."""
    move = module.to
    module.to = lambda place: module if isinstance(place, torch.device) else move(place)
    try:
        yield
    finally:
        del module.to


class OmniStableUnCLIPPipeline(_UnCLIPParts, StableUnCLIPPipeline):
    """`StableUnCLIPPipeline` that owns its offloading; the prior has a text encoder of its own, and runs to its end first."""

    _dit_modules: ClassVar[list[str]] = ["prior", "unet"]
    _encoder_modules: ClassVar[list[str]] = ["prior_text_encoder", "text_encoder", "image_normalizer"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        PLAN,
        block_attrs={"prior": ("transformer_blocks",), **PLAN.block_attrs},
        encoder_block_attrs={"prior_text_encoder": ("text_model.encoder.layers",), "text_encoder": ("encoder.layers",)},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {**_ENTRY_POINTS, "prior": ("post_process_latents",)}


class OmniStableUnCLIPImg2ImgPipeline(_UnCLIPParts, StableUnCLIPImg2ImgPipeline):
    """`StableUnCLIPImg2ImgPipeline` that owns its offloading; an image encoder stands in for the prior."""
