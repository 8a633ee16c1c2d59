"""Tiny UNets of the Stable Diffusion families, and what goes with them."""

from typing import Any

import torch
from diffusers import ControlNetModel, ControlNetUnionModel, UNet2DConditionModel

from pipelines.tiny.components import TEXT_WIDTH, ready

__all__ = ["control_net", "control_net_union", "ip_adapter", "unet_2d"]

#: What a UNet and its ControlNet have in common: two levels, with cross attention in the first and in the middle block.
_SIZES: dict[str, Any] = {
    "in_channels": 4,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": TEXT_WIDTH,
    "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}


def unet_2d(**settings: Any) -> Any:
    """Return a UNet of two levels, with cross attention in the first and in the middle block.

    Args:
        settings: Settings of `UNet2DConditionModel`, in place of those here or beside them.
    """
    defaults = {
        **_SIZES,
        "sample_size": 8,
        "out_channels": 4,
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return ready(UNet2DConditionModel(**{**defaults, **settings}))


def control_net(**settings: Any) -> Any:
    """Return a ControlNet for `unet_2d`, whose latents have half the height and width of the pictures.

    Its convolutions that begin as zeros are filled with noise: it would have no effect otherwise.

    Args:
        settings: Settings of `ControlNetModel`, in place of those here or beside them.
    """
    return ready(ControlNetModel(**{**_SIZES, "conditioning_embedding_out_channels": (8, 16), **settings}))


def control_net_union(**settings: Any) -> Any:
    """Return a ControlNet for control pictures of two kinds, otherwise as `control_net`.

    Args:
        settings: Settings of `ControlNetUnionModel`, in place of those here or beside them.
    """
    sizes = {**_SIZES, "conditioning_embedding_out_channels": (8, 16), "num_control_type": 2, "num_trans_head": 2, **settings}
    channels = dict.fromkeys(("num_trans_channel", "num_proj_channel"), sizes["block_out_channels"][0])
    return ready(ControlNetUnionModel(**sizes, **channels))


def ip_adapter(unet: Any, *, image_width: int = TEXT_WIDTH) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of an IP-Adapter, as `load_ip_adapter` takes them.

    Args:
        unet: The UNet that it is for.
        image_width: Size of what the image encoder returns.
    """
    width, tokens = unet.config.cross_attention_dim, 4
    projection = {
        "proj.weight": _noise(width * tokens, image_width),
        "proj.bias": _noise(width * tokens),
        "norm.weight": 1 + _noise(width),
        "norm.bias": _noise(width),
    }
    crossing = [name.removesuffix(".processor") for name in unet.attn_processors if name.endswith("attn2.processor")]
    shapes = [unet.get_submodule(name).to_k.weight.shape for name in crossing]
    attention = {
        f"{number}.to_{which}_ip.weight": _noise(*shape)
        for number, shape in zip(range(1, 2 * len(shapes), 2), shapes, strict=True)
        for which in "kv"
    }
    return {"image_proj": projection, "ip_adapter": attention}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.1
