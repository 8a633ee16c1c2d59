"""Kandinsky 5 cases: random weights, two or three hundred thousand parameters, 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5Transformer3DModel

from pipelines.kandinsky5.pipeline_kandinsky5 import (
    OmniKandinsky5I2IPipeline,
    OmniKandinsky5I2VPipeline,
    OmniKandinsky5T2IPipeline,
    OmniKandinsky5T2VPipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready
from pipelines.tiny.inputs import picture
from pipelines.tiny.language import qwen25_vl_encoder, qwen25_vl_processor
from pipelines.tiny.tokenizers import clip_tokenizer, qwen_tokenizer
from pipelines.tiny.videos import autoencoder_hunyuan_video

__all__ = ["KANDINSKY5_I2I", "KANDINSKY5_I2V", "KANDINSKY5_T2I", "KANDINSKY5_T2V"]

_LATENT_CHANNELS = 4


def _transformer(*, sees_frames: bool) -> Any:
    return ready(
        Kandinsky5Transformer3DModel(
            in_visual_dim=_LATENT_CHANNELS,
            out_visual_dim=_LATENT_CHANNELS,
            in_text_dim=TEXT_WIDTH,
            in_text_dim2=TEXT_WIDTH,
            time_dim=16,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=2,
            num_visual_blocks=3,
            axes_dims=(4, 6, 6),
            visual_cond=sees_frames,
        )
    )


def _pipeline(cls: Any, *, vae: Any, sees_frames: bool, tokenizer: Any = None, seen: str = "") -> Any:
    """Return a pipeline with a short template for prompts: upstream sets that by itself, and saves none.

    Args:
        cls: Its class.
        vae: Its VAE.
        sees_frames: Whether the DiT is given latents of a picture beside those that it makes better.
        tokenizer: Of the first text encoder; None for one that takes text only.
        seen: What the template has for a picture.
    """
    pipeline = cls(
        transformer=_transformer(sees_frames=sees_frames),
        vae=vae,
        text_encoder=qwen25_vl_encoder(layers=2),
        tokenizer=tokenizer or qwen_tokenizer(),
        text_encoder_2=clip_text_encoder(layers=2),
        tokenizer_2=clip_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipeline.prompt_template, pipeline.prompt_template_encode_start_idx = f"<|im_start|>{{}}{seen}<|im_end|>", 1
    return pipeline


def _image(cls: Any, **settings: Any) -> Any:
    vae = autoencoder_kl(widths=(8, 8, 8, 8), latent_channels=_LATENT_CHANNELS)
    pipeline = _pipeline(cls, vae=vae, **settings)
    pipeline.resolutions = [(32, 32)]
    return pipeline


def _text_to_image() -> Any:
    return _image(OmniKandinsky5T2IPipeline, sees_frames=False)


def _image_to_image() -> Any:
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    return _image(OmniKandinsky5I2IPipeline, sees_frames=True, tokenizer=qwen25_vl_processor(), seen=seen)


def _video(cls: Any) -> Any:
    return _pipeline(cls, vae=autoencoder_hunyuan_video(), sees_frames=True)


_NOT_SAVED = {
    "check_save_pretrained": "upstream saves neither a prompt's template nor the sizes of pictures, both of which are shorter here"
}

_NO_VIDEO_PROCESSOR = {
    "check_save_pretrained": "transformers does not save a processor that has no part for videos, which takes torchvision"
}

_case = functools.partial(prompted_case, negative_prompt="blurry", max_sequence_length=64, expected_failures=_NOT_SAVED)

KANDINSKY5_T2I = _case("kandinsky5_t2i", _text_to_image, seed=160)
"""Text to image with guidance: two blocks for the text and three for the picture, run twice a step."""

KANDINSKY5_T2V = _case("kandinsky5_t2v", lambda: _video(OmniKandinsky5T2VPipeline), seed=161, num_frames=5)
"""Text to video."""

KANDINSKY5_I2V = _case("kandinsky5_i2v", lambda: _video(OmniKandinsky5I2VPipeline), seed=162, image=picture(), num_frames=17)
"""Text and the first frame to video: the first four latent frames are made to look like the fifth."""

KANDINSKY5_I2I = _case("kandinsky5_i2i", _image_to_image, seed=163, image=picture(), expected_failures=_NO_VIDEO_PROCESSOR)
"""Picture and text to image: the first text encoder sees the picture with either prompt."""
