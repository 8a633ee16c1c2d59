"""LTX-Video cases: random weights, one or two hundred thousand parameters, nine frames of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXEulerAncestralRFScheduler,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx import LTXLatentUpsamplerModel

from pipelines.ltx.pipeline_ltx import (
    OmniLTXConditionPipeline,
    OmniLTXI2VLongMultiPromptPipeline,
    OmniLTXImageToVideoPipeline,
    OmniLTXLatentUpsamplePipeline,
    OmniLTXPipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready, t5_encoder
from pipelines.tiny.inputs import picture
from pipelines.tiny.logs import keep_back
from pipelines.tiny.tokenizers import t5_tokenizer
from pipelines.tiny.videos import clip

__all__ = ["LTX", "LTX_CONDITION", "LTX_IMAGE_TO_VIDEO", "LTX_LATENT_UPSAMPLE", "LTX_LONG"]

_LATENT_CHANNELS = 8
_FRAMES = 5


def _vae(**settings: Any) -> Any:
    """Return a VAE whose latents are an eighth as high and wide and a quarter as many, with a mean and a deviation that matter."""
    widths = (8, 8, 8, 8)
    vae = AutoencoderKLLTXVideo(
        latent_channels=_LATENT_CHANNELS,
        block_out_channels=widths,
        decoder_block_out_channels=widths,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        patch_size=2,
        **settings,
    )
    vae.latents_mean.normal_(std=0.3)
    vae.latents_std.uniform_(0.5, 1.5)
    return ready(vae)


def _pipeline(cls: Any, scheduler: Any = None, **settings: Any) -> Any:
    transformer = LTXVideoTransformer3DModel(
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=TEXT_WIDTH,
    )
    return cls(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(**settings),
        text_encoder=t5_encoder(layers=2),
        tokenizer=t5_tokenizer(),
        transformer=ready(transformer),
    )


def _condition() -> Any:
    keep_back(FlowMatchEulerDiscreteScheduler, "`timesteps` were passed without `sigmas`")
    return _pipeline(OmniLTXConditionPipeline, FlowMatchEulerDiscreteScheduler())  # times that are given are not shifted


def _upsample() -> Any:
    upsampler = LTXLatentUpsamplerModel(in_channels=_LATENT_CHANNELS, mid_channels=32, num_blocks_per_stage=2)
    return OmniLTXLatentUpsamplePipeline(vae=_vae(), latent_upsampler=ready(upsampler))


_case = functools.partial(prompted_case, negative_prompt="blurry", max_sequence_length=32, num_frames=_FRAMES)

LTX = _case("ltx", lambda: _pipeline(OmniLTXPipeline, timestep_conditioning=True), seed=125, decode_timestep=0.05)
"""Text to video, by a decoder that is told how much noise there is."""

LTX_IMAGE_TO_VIDEO = _case("ltx_i2v", lambda: _pipeline(OmniLTXImageToVideoPipeline), seed=126, image=picture())
"""Text and the first frame to video."""

LTX_CONDITION = _case("ltx_condition", _condition, seed=127, image=picture(), frame_index=4, strength=0.8, timesteps=[1000.0, 600.0])
"""Text and a frame in the middle to video."""

LTX_LATENT_UPSAMPLE = prompted_case(
    "ltx_latent_upsample",
    _upsample,
    seed=128,
    leave_out=("prompt", "num_inference_steps"),
    video=clip(_FRAMES),
    adain_factor=0.5,
)
"""A video of twice the height and width: the VAE encodes and decodes."""

LTX_LONG = _case(
    "ltx_long",
    lambda: _pipeline(OmniLTXI2VLongMultiPromptPipeline, LTXEulerAncestralRFScheduler(), timestep_conditioning=True),
    seed=129,
    prompt="a red cat | a blue dog",
    cond_image=picture(),
    guidance_scale=2.0,
    sigmas=[1.0, 0.6, 0.0],
    num_frames=17,
    temporal_tile_size=12,
    temporal_overlap=4,
    decode_horizontal_tiles=2,
    decode_vertical_tiles=1,
    decode_overlap=1,
    callback_on_step_end_tensor_inputs=["prompt_embeds"],  # upstream gives latents that are not packed, and takes them back as packed
)
"""The first frame and two prompts to a video of two windows, which overlap; it is decoded in two tiles."""
