"""What all Stable Diffusion pipelines are made of."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from diffusers import StableDiffusionPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["ENTRY_POINTS", "PLAN", "StableDiffusionComponents", "StableDiffusionParts", "plan_without"]

PLAN = OffloadPlan(
    block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")},
    encoder_block_attrs={
        "text_encoder": ("encoder.layers",),
        "image_encoder": ("vision_model.encoder.layers",),
        "safety_checker": ("vision_model.encoder.layers",),
    },
)
"""A UNet's blocks in the order in which they run: it registers the middle one last."""


def plan_without(*encoders: str) -> OffloadPlan:
    """Return the plan of a pipeline that has no such encoders."""
    stacks = {name: blocks for name, blocks in PLAN.encoder_block_attrs.items() if name not in encoders}
    return attrs.evolve(PLAN, encoder_block_attrs=stacks)


ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "vae": ("encode", "decode"),
    "": ("encode_prompt", "encode_image", "prepare_ip_adapter_image_embeds"),
}


class StableDiffusionComponents(OmniOffloadMixin):
    """The components of a Stable Diffusion pipeline.

    `image_encoder` is there for an IP-Adapter only. The safety checker, an image encoder too, looks at the finished
    pictures; it may be None.
    """

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder", "safety_checker"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _offload_plan: ClassVar[OffloadPlan] = PLAN


class StableDiffusionParts(StableDiffusionComponents):
    """The components of a pipeline that encodes prompts as Stable Diffusion itself does."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS

    @functools.wraps(StableDiffusionPipeline.encode_prompt)
    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Encode prompts; with `clip_skip` the pipeline itself runs the text encoder's last norm, which must be there for it."""
        skips = kwargs.get("clip_skip") is not None
        with self.on_device("text_encoder") if skips else contextlib.nullcontext():
            return super().encode_prompt(*args, **kwargs)  # type: ignore[misc]  # of the pipeline behind the parts
