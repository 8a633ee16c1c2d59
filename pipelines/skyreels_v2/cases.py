"""SkyReels V2 cases: random weights, about a hundred thousand parameters, frames of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import SkyReelsV2Transformer3DModel, UniPCMultistepScheduler

from pipelines.skyreels_v2.pipeline_skyreels_v2 import (
    OmniSkyReelsV2DiffusionForcingImageToVideoPipeline,
    OmniSkyReelsV2DiffusionForcingPipeline,
    OmniSkyReelsV2DiffusionForcingVideoToVideoPipeline,
    OmniSkyReelsV2ImageToVideoPipeline,
    OmniSkyReelsV2Pipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, clip_image_processor, clip_vision_encoder, umt5_encoder
from pipelines.tiny.inputs import picture
from pipelines.tiny.tokenizers import t5_tokenizer
from pipelines.tiny.videos import WAN_LATENT_CHANNELS, autoencoder_wan, clip, wan_transformer

__all__ = [
    "SKYREELS_V2",
    "SKYREELS_V2_FORCING",
    "SKYREELS_V2_FORCING_IMAGE_TO_VIDEO",
    "SKYREELS_V2_FORCING_VIDEO_TO_VIDEO",
    "SKYREELS_V2_IMAGE_TO_VIDEO",
]


def _pipeline(cls: Any, *, sees_picture: bool = False, **settings: Any) -> Any:
    sizes: dict[str, Any] = {"num_layers": 3, **settings}
    parts: dict[str, Any] = {}
    if sees_picture:
        sizes |= {"in_channels": 3 * WAN_LATENT_CHANNELS, "image_dim": TEXT_WIDTH, "added_kv_proj_dim": 24}
        parts |= {"image_processor": clip_image_processor(), "image_encoder": clip_vision_encoder(layers=2, projects=True)}
    return cls(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(layers=2),
        vae=autoencoder_wan(),
        transformer=wan_transformer(SkyReelsV2Transformer3DModel, **sizes),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        **parts,
    )


_case = functools.partial(prompted_case, negative_prompt="blurry", num_frames=5, max_sequence_length=32)

SKYREELS_V2 = _case("skyreels_v2", lambda: _pipeline(OmniSkyReelsV2Pipeline), seed=140)
"""Text to video."""

SKYREELS_V2_IMAGE_TO_VIDEO = _case(
    "skyreels_v2_i2v", lambda: _pipeline(OmniSkyReelsV2ImageToVideoPipeline, sees_picture=True), seed=141, image=picture()
)
"""Picture to video, with an image encoder."""

SKYREELS_V2_FORCING = _case(
    "skyreels_v2_forcing",
    lambda: _pipeline(OmniSkyReelsV2DiffusionForcingPipeline, inject_sample_info=True),
    seed=142,
    num_frames=9,
    base_num_frames=5,
    overlap_history=1,
)
"""Text to a long video, in windows: the second begins with the end of the first."""

SKYREELS_V2_FORCING_IMAGE_TO_VIDEO = _case(
    "skyreels_v2_forcing_i2v",
    lambda: _pipeline(OmniSkyReelsV2DiffusionForcingImageToVideoPipeline),
    seed=143,
    image=picture(),
    base_num_frames=5,
    ar_step=1,
    causal_block_size=1,
)
"""Picture to video, in which later frames lag behind."""

SKYREELS_V2_FORCING_VIDEO_TO_VIDEO = _case(
    "skyreels_v2_forcing_v2v",
    lambda: _pipeline(OmniSkyReelsV2DiffusionForcingVideoToVideoPipeline),
    seed=144,
    video=clip(5),
    num_frames=9,
    base_num_frames=9,
    overlap_history=1,
)
"""A video that goes on."""
