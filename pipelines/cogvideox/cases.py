"""CogVideoX cases: random weights, about a hundred thousand parameters, five frames of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel

from pipelines.cogvideox.pipeline_cogvideox import (
    OmniCogVideoXFunControlPipeline,
    OmniCogVideoXImageToVideoPipeline,
    OmniCogVideoXPipeline,
    OmniCogVideoXVideoToVideoPipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready, t5_encoder
from pipelines.tiny.inputs import picture
from pipelines.tiny.tokenizers import t5_tokenizer
from pipelines.tiny.videos import clip

__all__ = ["COGVIDEOX", "COGVIDEOX_FUN_CONTROL", "COGVIDEOX_IMAGE_TO_VIDEO", "COGVIDEOX_VIDEO_TO_VIDEO"]

_LATENT_CHANNELS = 4
_FRAMES = 5


def _vae() -> Any:
    levels = 3
    return ready(
        AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * levels,
            up_block_types=("CogVideoXUpBlock3D",) * levels,
            block_out_channels=(8,) * levels,
            latent_channels=_LATENT_CHANNELS,
            layers_per_block=1,
            norm_num_groups=4,
            temporal_compression_ratio=4,
            sample_height=32,
            sample_width=32,
        )
    )


def _transformer(**settings: Any) -> Any:
    defaults = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": _LATENT_CHANNELS,
        "out_channels": _LATENT_CHANNELS,
        "time_embed_dim": 8,
        "text_embed_dim": TEXT_WIDTH,
        "num_layers": 3,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": _FRAMES,
        "patch_size": 2,
        "max_text_seq_length": 32,
        "use_rotary_positional_embeddings": True,
    }
    return ready(CogVideoXTransformer3DModel(**{**defaults, **settings}))


def _pipeline(cls: Any, **settings: Any) -> Any:
    return cls(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(layers=2),
        vae=_vae(),
        transformer=_transformer(**settings),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"),
    )


_case = functools.partial(prompted_case, negative_prompt="blurry", max_sequence_length=32)

COGVIDEOX = _case("cogvideox", lambda: _pipeline(OmniCogVideoXPipeline), seed=120, num_frames=_FRAMES)
"""Text to video: three blocks."""

COGVIDEOX_IMAGE_TO_VIDEO = _case(
    "cogvideox_i2v",
    lambda: _pipeline(
        OmniCogVideoXImageToVideoPipeline, in_channels=2 * _LATENT_CHANNELS, use_learned_positional_embeddings=True, ofs_embed_dim=8
    ),
    seed=121,
    image=picture(),
    num_frames=_FRAMES,
)
"""Text and the first frame to video, with learned positions too."""

COGVIDEOX_VIDEO_TO_VIDEO = _case(
    "cogvideox_v2v",
    lambda: _pipeline(OmniCogVideoXVideoToVideoPipeline),
    seed=122,
    video=clip(_FRAMES),
    strength=0.9,
    num_inference_steps=3,
)
"""Text and video to video: two of three steps."""

COGVIDEOX_FUN_CONTROL = _case(
    "cogvideox_fun_control",
    lambda: _pipeline(OmniCogVideoXFunControlPipeline, in_channels=2 * _LATENT_CHANNELS),
    seed=123,
    control_video=clip(_FRAMES),
)
"""Text and a control video to video."""
