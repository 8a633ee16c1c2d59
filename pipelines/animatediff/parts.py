"""What AnimateDiff pipelines are made of."""

from typing import ClassVar

import attrs

from omni_offload import OffloadPlan
from pipelines.stable_diffusion.parts import PLAN as STABLE_DIFFUSION_PLAN
from pipelines.stable_diffusion.parts import StableDiffusionParts

__all__ = ["ADAPTER_BLOCKS", "CONTROL_BLOCKS", "PLAN", "AnimateDiffParts"]

_ENCODERS = ("text_encoder", "image_encoder")

ADAPTER_BLOCKS = ("down_blocks", "mid_block", "up_blocks")

CONTROL_BLOCKS = ("down_blocks", "mid_block")
"""Blocks of a ControlNet in the order in which they run."""

PLAN = attrs.evolve(
    STABLE_DIFFUSION_PLAN,
    encoder_block_attrs={name: STABLE_DIFFUSION_PLAN.encoder_block_attrs[name] for name in _ENCODERS},
)


class AnimateDiffParts(StableDiffusionParts):
    """The components of an AnimateDiff pipeline.

    When it is made, the UNet takes over copies of the weights of `motion_adapter`. That stays among the components, so that it is
    saved with them, but never runs: it is never on the device. `image_encoder` is there for an IP-Adapter only.
    """

    _dit_modules: ClassVar[list[str]] = ["unet", "motion_adapter"]
    _encoder_modules: ClassVar[list[str]] = list(_ENCODERS)
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(PLAN, block_attrs={**PLAN.block_attrs, "motion_adapter": ADAPTER_BLOCKS})
