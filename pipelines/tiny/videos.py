"""Tiny video models that several families share, and videos to begin with."""

from typing import Any

from diffusers import AutoencoderKLHunyuanVideo, AutoencoderKLWan, WanTransformer3DModel
from PIL import Image

from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.inputs import picture

__all__ = ["WAN_LATENT_CHANNELS", "WAN_TRANSFORMER", "autoencoder_hunyuan_video", "autoencoder_wan", "clip", "wan_transformer"]

WAN_LATENT_CHANNELS = 4
"""Channels of the latents of `autoencoder_wan`, which are an eighth as high and wide as the pictures, and a quarter as many."""

WAN_TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": WAN_LATENT_CHANNELS,
    "out_channels": WAN_LATENT_CHANNELS,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 4,
    "rope_max_seq_len": 64,
}
"""Settings of a DiT of the Wan kind."""


def autoencoder_wan(**settings: Any) -> Any:
    """Return a video autoencoder of the Wan kind.

    Args:
        settings: Settings of `AutoencoderKLWan`, in place of those here or beside them.
    """
    defaults = {
        "base_dim": 4,
        "z_dim": WAN_LATENT_CHANNELS,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1, -0.2, 0.3, -0.4],
        "latents_std": [1.5, 0.75, 2.0, 1.25],
    }
    return ready(AutoencoderKLWan(**{**defaults, **settings}))


def wan_transformer(cls: Any = WanTransformer3DModel, **settings: Any) -> Any:
    """Return a DiT for latents of `autoencoder_wan`.

    Args:
        cls: Its class, of those that take Wan's settings.
        settings: Settings in place of `WAN_TRANSFORMER` or beside them.
    """
    return ready(cls(**{**WAN_TRANSFORMER, **settings}))


def autoencoder_hunyuan_video() -> Any:
    """Return a video autoencoder of the HunyuanVideo kind: latents of 4 channels, an eighth as high and wide, a quarter as many."""
    levels = 4
    return ready(
        AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * levels,
            up_block_types=("HunyuanVideoUpBlock3D",) * levels,
            block_out_channels=(8,) * levels,
            layers_per_block=1,
            norm_num_groups=4,
        )
    )


def clip(frames: int, *, width: int = 32, height: int = 32) -> list[Image.Image]:
    """Return a video of one picture that is mirrored in every other frame."""
    first = picture(width=width, height=height)
    second = first.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return [(first, second)[index % 2] for index in range(frames)]
