"""What all Stable Diffusion XL pipelines are made of."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["ENCODERS", "ENTRY_POINTS", "PLAN", "StableDiffusionXLParts", "StableDiffusionXLTextParts"]

ENCODERS: tuple[str, ...] = ("text_encoder", "text_encoder_2")

_TEXT_PLAN = OffloadPlan(
    block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")},
    encoder_block_attrs={"text_encoder": ("encoder.layers",), "text_encoder_2": ("text_model.encoder.layers",)},
)

PLAN = attrs.evolve(_TEXT_PLAN, encoder_block_attrs={**_TEXT_PLAN.encoder_block_attrs, "image_encoder": ("vision_model.encoder.layers",)})

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "vae": ("encode", "decode"),
    "": ("encode_prompt", "encode_image", "prepare_ip_adapter_image_embeds"),
}
"""For the pipelines that take image prompts."""


class StableDiffusionXLTextParts(OmniOffloadMixin):
    """The components of a Stable Diffusion XL pipeline that takes no image prompts.

    With a negative prompt the two text encoders run in turn, twice each, so that they are on the device together.
    """

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = [*ENCODERS]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = _TEXT_PLAN

    vae: Any

    def upcast_vae(self) -> None:
        """Cast the VAE to float32, as upstream does in a call in float16, without its warning that nobody else should."""
        self.vae.to(dtype=torch.float32)


class StableDiffusionXLParts(StableDiffusionXLTextParts):
    """The components of a Stable Diffusion XL pipeline; `image_encoder` is there for an IP-Adapter only."""

    _encoder_modules: ClassVar[list[str]] = [*ENCODERS, "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = PLAN
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
