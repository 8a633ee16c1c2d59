"""HunyuanVideo cases: random weights, one or two hundred thousand parameters, five frames of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoTransformer3DModel,
)

from pipelines.hunyuan_video.pipeline_hunyuan_video import (
    OmniHunyuanSkyreelsImageToVideoPipeline,
    OmniHunyuanVideoFramepackPipeline,
    OmniHunyuanVideoImageToVideoPipeline,
    OmniHunyuanVideoPipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import (
    TEXT_WIDTH,
    clip_image_processor,
    clip_text_encoder,
    ready,
    siglip_image_processor,
    siglip_vision_encoder,
)
from pipelines.tiny.inputs import picture
from pipelines.tiny.language import llama_encoder, llava_encoder
from pipelines.tiny.tokenizers import clip_tokenizer, llama_tokenizer
from pipelines.tiny.videos import autoencoder_hunyuan_video

__all__ = ["HUNYUAN_SKYREELS_IMAGE_TO_VIDEO", "HUNYUAN_VIDEO", "HUNYUAN_VIDEO_FRAMEPACK", "HUNYUAN_VIDEO_IMAGE_TO_VIDEO"]

_LATENT_CHANNELS = 4
_FRAMES = 5
_END, _PICTURE = "<|end_header_id|>", "<image>"
"""Tokens of a prompt with a picture: the end of the name of whoever speaks, and what stands for the picture."""


def _transformer(cls: Any = HunyuanVideoTransformer3DModel, **settings: Any) -> Any:
    defaults = {
        "in_channels": _LATENT_CHANNELS,
        "out_channels": _LATENT_CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 2,
        "patch_size": 1,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": TEXT_WIDTH,
        "pooled_projection_dim": TEXT_WIDTH,
        "rope_axes_dim": (4, 6, 6),
    }
    return ready(cls(**{**defaults, **settings}))


def _pipeline(cls: Any, *, transformer: Any, **parts: Any) -> Any:
    defaults = {
        "text_encoder": llama_encoder(),
        "tokenizer": llama_tokenizer(),
        "vae": autoencoder_hunyuan_video(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": clip_text_encoder(layers=2),
        "tokenizer_2": clip_tokenizer(),
        "transformer": transformer,
    }
    return cls(**{**defaults, **parts})


def _text_to_video() -> Any:
    return _pipeline(OmniHunyuanVideoPipeline, transformer=_transformer())


def _skyreels_image_to_video() -> Any:
    transformer = _transformer(in_channels=2 * _LATENT_CHANNELS)
    return _pipeline(OmniHunyuanSkyreelsImageToVideoPipeline, transformer=transformer)


def _image_to_video() -> Any:
    tokenizer = llama_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [_END, _PICTURE]})
    return _pipeline(
        OmniHunyuanVideoImageToVideoPipeline,
        transformer=_transformer(in_channels=2 * _LATENT_CHANNELS + 1, image_condition_type="latent_concat"),
        tokenizer=tokenizer,
        text_encoder=llava_encoder(picture_token=tokenizer.convert_tokens_to_ids(_PICTURE)),
        image_processor=clip_image_processor(),
    )


def _framepack() -> Any:
    transformer = _transformer(
        HunyuanVideoFramepackTransformer3DModel,
        patch_size=2,
        has_image_proj=True,
        image_proj_dim=TEXT_WIDTH,
        has_clean_x_embedder=True,
    )
    return _pipeline(
        OmniHunyuanVideoFramepackPipeline,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        image_encoder=siglip_vision_encoder(layers=2),
        feature_extractor=siglip_image_processor(),
    )


_case = functools.partial(prompted_case, num_frames=_FRAMES, max_sequence_length=24)
_TEXT: dict[str, Any] = {"prompt_template": {"template": "{}", "crop_start": 0}}
_GUIDED: dict[str, Any] = {"negative_prompt": "blurry", "true_cfg_scale": 2.0}

HUNYUAN_VIDEO = _case("hunyuan_video", _text_to_video, seed=150, **_TEXT, **_GUIDED)
"""Text to video with negative prompts: two blocks that refine the text, two double and two single ones, all run twice a step."""

HUNYUAN_SKYREELS_IMAGE_TO_VIDEO = _case(
    "hunyuan_skyreels_i2v", _skyreels_image_to_video, seed=151, image=picture(), true_cfg_scale=1.0, **_TEXT
)
"""Text and the first frame to video."""

HUNYUAN_VIDEO_IMAGE_TO_VIDEO = _case(
    "hunyuan_video_i2v",
    _image_to_video,
    seed=152,
    image=picture(),
    prompt_template={
        "template": f"{_END}{_PICTURE}{_END}{{}}say{_END}",
        "crop_start": 3,
        "image_emb_start": 1,
        "image_emb_end": 17,
        "image_emb_len": 16,
    },
)
"""Text and the first frame to video, by a text encoder that sees the frame."""

HUNYUAN_VIDEO_FRAMEPACK = _case(
    "hunyuan_video_framepack", _framepack, seed=153, image=picture(), num_frames=6, latent_window_size=2, **_TEXT
)
"""Text and the first frame to video, in two sections, from the last to the first."""
