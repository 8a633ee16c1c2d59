"""EasyAnimate cases: random weights, two hundred thousand parameters, five frames of 32 x 32 pixels."""

import functools
from typing import Any

import torch
from diffusers import AutoencoderKLMagvit, EasyAnimateTransformer3DModel, FlowMatchEulerDiscreteScheduler

from pipelines.easyanimate.pipeline_easyanimate import (
    OmniEasyAnimateInpaintPipeline,
    OmniEasyAnimatePipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.language import qwen25_vl_encoder
from pipelines.tiny.tokenizers import qwen_tokenizer

__all__ = ["EASYANIMATE", "EASYANIMATE_INPAINT"]

_LATENT_CHANNELS = 4
_FRAMES = 5


def _vae() -> Any:
    levels = 4
    return ready(
        AutoencoderKLMagvit(
            latent_channels=_LATENT_CHANNELS,
            block_out_channels=(8,) * levels,
            layers_per_block=1,
            norm_num_groups=4,
        )
    )


def _pipeline(cls: Any, *, in_channels: int = _LATENT_CHANNELS) -> Any:
    transformer = EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=_LATENT_CHANNELS,
        patch_size=2,
        sample_width=4,
        sample_height=4,
        num_layers=3,
        mmdit_layers=2,
        time_embed_dim=8,
        text_embed_dim=TEXT_WIDTH,
        add_noise_in_inpaint_model=False,
    )
    return cls(
        vae=_vae(),
        text_encoder=qwen25_vl_encoder(layers=3),
        tokenizer=qwen_tokenizer(),
        transformer=ready(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def _video(channels: int) -> torch.Tensor:
    """Return a video in which a ramp moves: `[1, channels, frames, 32, 32]`, from 0 to 1."""
    ramp = torch.linspace(0, 1, 32).expand(channels, 32, 32)
    return torch.stack([ramp.roll(4 * frame, dims=-1) for frame in range(_FRAMES)], dim=1)[None]


_case = functools.partial(prompted_case, negative_prompt="blurry", num_frames=_FRAMES)

EASYANIMATE = _case("easyanimate", lambda: _pipeline(OmniEasyAnimatePipeline), seed=220)
"""Text to video: two blocks with two streams and one with one, by the text encoder's last layer but one."""

EASYANIMATE_INPAINT = _case(
    "easyanimate_inpaint",
    lambda: _pipeline(OmniEasyAnimateInpaintPipeline, in_channels=2 * _LATENT_CHANNELS + 1),
    seed=222,
    video=_video(3),
    mask_video=torch.full((1, 1, _FRAMES, 32, 32), 255.0),
)
"""Text and a video, all of which is masked, to video; at full strength, as less draws from encodings with no generator."""
