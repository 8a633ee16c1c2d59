"""Wan cases: random weights, one or two hundred thousand parameters, five frames of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from omni_offload.testing import PipelineCase
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import (
    TEXT_WIDTH,
    clip_image_processor,
    clip_vision_encoder,
    umt5_encoder,
)
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer
from pipelines.tiny.videos import WAN_LATENT_CHANNELS, autoencoder_wan, wan_transformer
from pipelines.wan.pipeline_wan import OmniWanPipeline
from pipelines.wan.pipeline_wan_i2v import OmniWanImageToVideoPipeline

__all__ = ["WAN_2_1", "WAN_2_1_I2V", "WAN_2_2", "WAN_2_2_I2V", "WAN_2_2_TI2V"]

_PICTURE_CHANNELS = 3 * WAN_LATENT_CHANNELS  # noise, mask (one channel for each of four frames) and the encoded picture


def _text_to_video(**parts: Any) -> OmniWanPipeline:
    return OmniWanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(layers=2),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=wan_transformer(),
        **parts,
    )


def _image_to_video(**parts: Any) -> OmniWanImageToVideoPipeline:
    return OmniWanImageToVideoPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(layers=2),
        vae=autoencoder_wan(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        **parts,
    )


def _wan_2_1() -> OmniWanPipeline:
    return _text_to_video(vae=autoencoder_wan())


def _wan_2_2() -> OmniWanPipeline:
    return _text_to_video(vae=autoencoder_wan(), transformer_2=wan_transformer(), boundary_ratio=0.875)


def _wan_2_2_ti2v() -> OmniWanPipeline:
    vae = autoencoder_wan(
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=16,
        decoder_base_dim=4,
    )
    return _text_to_video(vae=vae, expand_timesteps=True)


def _wan_2_1_i2v() -> OmniWanImageToVideoPipeline:
    return _image_to_video(
        image_processor=clip_image_processor(),
        image_encoder=clip_vision_encoder(layers=2),
        transformer=wan_transformer(in_channels=_PICTURE_CHANNELS, image_dim=TEXT_WIDTH, added_kv_proj_dim=24, pos_embed_seq_len=None),
    )


def _wan_2_2_i2v() -> OmniWanImageToVideoPipeline:
    return _image_to_video(
        transformer=wan_transformer(in_channels=_PICTURE_CHANNELS),
        transformer_2=wan_transformer(in_channels=_PICTURE_CHANNELS),
        boundary_ratio=0.9,
    )


_inputs = functools.partial(prompted_inputs, negative_prompt="blurry", num_frames=5, max_sequence_length=32)

WAN_2_1 = PipelineCase(
    name="wan_2_1", make_pipeline=functools.partial(seeded_pipeline, 1, _wan_2_1), make_inputs=_inputs(), outputs=as_tensors
)
"""Text to video with one DiT."""

WAN_2_2 = PipelineCase(
    name="wan_2_2",
    make_pipeline=functools.partial(seeded_pipeline, 2, _wan_2_2),
    make_inputs=_inputs(guidance_scale=4.0, guidance_scale_2=3.0),
    outputs=as_tensors,
)
"""Text to video with two DiTs: a step each."""

WAN_2_2_TI2V = PipelineCase(
    name="wan_2_2_ti2v", make_pipeline=functools.partial(seeded_pipeline, 3, _wan_2_2_ti2v), make_inputs=_inputs(), outputs=as_tensors
)
"""Text to video with one DiT, a time of its own for each token, and the VAE that works on patches."""

WAN_2_1_I2V = PipelineCase(
    name="wan_2_1_i2v",
    make_pipeline=functools.partial(seeded_pipeline, 4, _wan_2_1_i2v),
    make_inputs=_inputs(image=picture()),
    outputs=as_tensors,
)
"""Picture to video with one DiT and an image encoder."""

WAN_2_2_I2V = PipelineCase(
    name="wan_2_2_i2v",
    make_pipeline=functools.partial(seeded_pipeline, 5, _wan_2_2_i2v),
    make_inputs=_inputs(image=picture()),
    outputs=as_tensors,
)
"""Picture to video with two DiTs and no image encoder."""
