"""Cases of pipelines with Wan's parts that begin with a video or a picture: random weights, five frames of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import (
    ChronoEditTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanAnimateTransformer3DModel,
    WanVACETransformer3DModel,
)

from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, clip_image_processor, clip_vision_encoder, umt5_encoder
from pipelines.tiny.inputs import picture
from pipelines.tiny.tokenizers import t5_tokenizer
from pipelines.tiny.videos import WAN_LATENT_CHANNELS, autoencoder_wan, clip, wan_transformer
from pipelines.wan.pipeline_wan import OmniLucyEditPipeline, OmniWanVACEPipeline, OmniWanVideoToVideoPipeline
from pipelines.wan.pipeline_wan_picture import OmniChronoEditPipeline, OmniWanAnimatePipeline

__all__ = ["CHRONO_EDIT", "LUCY_EDIT", "WAN_ANIMATE", "WAN_VACE", "WAN_VIDEO_TO_VIDEO"]

_FRAMES = 5
_FACE = 16
"""Height and width in pixels of the video of a face."""

_SEES_PICTURE: dict[str, Any] = {"image_dim": TEXT_WIDTH, "added_kv_proj_dim": 24, "pos_embed_seq_len": None}


def _pipeline(cls: Any, *, transformer: Any, **parts: Any) -> Any:
    return cls(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(layers=2),
        vae=autoencoder_wan(),
        transformer=transformer,
        **{"scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0), **parts},
    )


def _picture_parts() -> dict[str, Any]:
    return {"image_processor": clip_image_processor(), "image_encoder": clip_vision_encoder(layers=2)}


def _vace() -> Any:
    channels = 2 * WAN_LATENT_CHANNELS + 64  # what is kept, what is changed, and the mask of 8 x 8 pixels
    transformer = wan_transformer(WanVACETransformer3DModel, num_layers=3, vace_layers=[0, 2], vace_in_channels=channels)
    return _pipeline(OmniWanVACEPipeline, transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))


def _video_to_video() -> Any:
    return _pipeline(OmniWanVideoToVideoPipeline, transformer=wan_transformer(num_layers=3))


def _lucy_edit() -> Any:
    transformer = wan_transformer(num_layers=3, in_channels=2 * WAN_LATENT_CHANNELS)
    return _pipeline(OmniLucyEditPipeline, transformer=transformer, expand_timesteps=True)


def _chrono_edit() -> Any:
    transformer = wan_transformer(ChronoEditTransformer3DModel, num_layers=3, in_channels=3 * WAN_LATENT_CHANNELS, **_SEES_PICTURE)
    return _pipeline(OmniChronoEditPipeline, transformer=transformer, **_picture_parts())


def _animate() -> Any:
    transformer = wan_transformer(
        WanAnimateTransformer3DModel,
        num_layers=4,
        inject_face_latents_blocks=2,
        in_channels=2 * WAN_LATENT_CHANNELS + 4,
        latent_channels=WAN_LATENT_CHANNELS,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=_FACE,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        **_SEES_PICTURE,
    )
    return _pipeline(OmniWanAnimatePipeline, transformer=transformer, **_picture_parts())


_case = functools.partial(prompted_case, negative_prompt="blurry", max_sequence_length=32)

WAN_VACE = _case("wan_vace", _vace, seed=130, video=clip(_FRAMES), mask=[picture().convert("L")] * _FRAMES, num_frames=_FRAMES)
"""Text, a control video and its mask to video: the VAE encodes twice."""

WAN_VIDEO_TO_VIDEO = _case("wan_video_to_video", _video_to_video, seed=131, video=clip(_FRAMES), strength=0.9, num_inference_steps=3)
"""Text and video to video: two of three steps."""

LUCY_EDIT = _case("lucy_edit", _lucy_edit, seed=132, video=clip(_FRAMES), num_frames=_FRAMES)
"""Editing a video, with a time of its own for each token."""

CHRONO_EDIT = _case("chrono_edit", _chrono_edit, seed=133, image=picture())
"""Editing a picture as the last frame of a short video."""

WAN_ANIMATE = _case(
    "wan_animate",
    _animate,
    seed=134,
    image=picture(),
    pose_video=clip(2 * _FRAMES - 1),
    face_video=clip(2 * _FRAMES - 1, width=_FACE, height=_FACE),
    segment_frame_length=_FRAMES,
    guidance_scale=2.0,
)
"""A picture that moves as a pose and a face in two videos do: nine frames in two segments."""
