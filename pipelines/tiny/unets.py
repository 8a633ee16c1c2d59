"""Tiny UNets of the Stable Diffusion families, and what goes with them."""

from typing import Any

from diffusers import ControlNetModel, UNet2DConditionModel

from pipelines.tiny.components import TEXT_WIDTH, ready

__all__ = ["control_net", "unet_2d"]

_WIDTHS = (16, 32)


def unet_2d(**settings: Any) -> Any:
    """Return a UNet of two levels, with cross attention in the first and in the middle block.

    Args:
        settings: Settings of `UNet2DConditionModel`, in place of those here or beside them.
    """
    defaults = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": _WIDTHS,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "cross_attention_dim": TEXT_WIDTH,
        "attention_head_dim": 2,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return ready(UNet2DConditionModel(**{**defaults, **settings}))


def control_net(unet: Any) -> Any:
    """Return a ControlNet for a UNet whose latents have half the height and width of the pictures.

    Its convolutions that begin as zeros are filled with noise: it would have no effect otherwise.
    """
    return ready(ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16)))
