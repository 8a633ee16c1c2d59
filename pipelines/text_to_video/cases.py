"""Cases of pipelines with three-dimensional UNets: random weights, three frames of 16 x 16 pixels."""

import functools
from typing import Any

from diffusers import DDIMScheduler, DiffusionPipeline, I2VGenXLUNet, UNet3DConditionModel

from pipelines.text_to_video.pipeline_text_to_video import OmniI2VGenXLPipeline, OmniTextToVideoSDPipeline, OmniVideoToVideoSDPipeline
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import (
    TEXT_WIDTH,
    autoencoder_kl,
    clip_image_processor,
    clip_text_encoder,
    clip_vision_encoder,
    ready,
    without_spread,
)
from pipelines.tiny.inputs import picture
from pipelines.tiny.logs import DEPRECATED, keep_back
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.videos import clip

__all__ = ["I2VGEN_XL", "TEXT_TO_VIDEO_SD", "VIDEO_TO_VIDEO_SD"]

_FRAMES = 3
_SIZE = 16
_MEAN = 2.0**36
"""A mean beside which the deviation of an encoding is lost, in float64 too."""
_BLOCKS: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": TEXT_WIDTH,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}


def _pipeline(cls: Any, *, unet: Any, vae: Any = None, **parts: Any) -> Any:
    keep_back(DiffusionPipeline, DEPRECATED)
    return cls(
        vae=autoencoder_kl(widths=(8, 16)) if vae is None else vae,
        text_encoder=clip_text_encoder(layers=2),
        tokenizer=clip_tokenizer(),
        unet=unet,
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        **parts,
    )


def _from_text(cls: Any) -> Any:
    return _pipeline(cls, unet=ready(UNet3DConditionModel(**_BLOCKS)))


def _i2vgen() -> Any:
    parts = {"image_encoder": clip_vision_encoder(layers=2, projects=True), "feature_extractor": clip_image_processor()}
    vae = without_spread(autoencoder_kl(widths=(8, 16)))  # the pipeline draws from encodings with no generator, and does not shift them
    vae.quant_conv.bias.data[: vae.config.latent_channels] = _MEAN
    vae.register_to_config(scaling_factor=1 / _MEAN)
    return _pipeline(OmniI2VGenXLPipeline, unet=ready(I2VGenXLUNet(**_BLOCKS, num_attention_heads=2)), vae=vae, **parts)


_SIZES: dict[str, Any] = {"height": _SIZE, "width": _SIZE, "num_frames": _FRAMES}
_case = functools.partial(prompted_case, negative_prompt="blurry")

TEXT_TO_VIDEO_SD = _case("text_to_video_sd", lambda: _from_text(OmniTextToVideoSDPipeline), seed=197, **_SIZES)
"""Text to video."""

VIDEO_TO_VIDEO_SD = _case(
    "video_to_video_sd",
    lambda: _from_text(OmniVideoToVideoSDPipeline),
    seed=198,
    leave_out=("height", "width"),
    video=clip(_FRAMES, width=_SIZE, height=_SIZE),
    strength=0.9,
    num_inference_steps=3,
)
"""Text and video to video: two of three steps."""

I2VGEN_XL = _case("i2vgen_xl", _i2vgen, seed=199, image=picture(width=_SIZE, height=_SIZE), decode_chunk_size=2, clip_skip=None, **_SIZES)
"""Text and picture to video, the frames of which are decoded in two chunks. Its default of `clip_skip` needs an older transformers."""
