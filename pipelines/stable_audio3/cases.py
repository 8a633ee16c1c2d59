"""Stable Audio 3 cases: random weights, two hundred thousand parameters, less than a second at 640 samples a second."""

import functools
from typing import Any

import torch
from diffusers import AutoencoderSAME, FlowMatchEulerDiscreteScheduler, StableAudio3DiTModel
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder

from pipelines.stable_audio3.pipeline_stable_audio3 import (
    OmniStableAudio3AudioToAudioPipeline,
    OmniStableAudio3InpaintPipeline,
    OmniStableAudio3Pipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.language import t5gemma_encoder
from pipelines.tiny.tokenizers import gemma_tokenizer

__all__ = ["STABLE_AUDIO_3", "STABLE_AUDIO_3_AUDIO_TO_AUDIO", "STABLE_AUDIO_3_INPAINT"]

_LATENT_CHANNELS = 8
_RATE = 640
_SECONDS = 0.8


def _vae() -> Any:
    return ready(
        AutoencoderSAME(
            audio_channels=2,
            patch_size=16,
            encoder_channels=16,
            encoder_c_mults=(2,),
            encoder_strides=(4,),
            encoder_transformer_depths=(2,),
            latent_dim=_LATENT_CHANNELS,
            dim_heads=8,
            sampling_rate=_RATE,
        )
    )


def _transformer() -> Any:
    return ready(
        StableAudio3DiTModel(
            io_channels=_LATENT_CHANNELS,
            patch_size=1,
            embed_dim=32,
            depth=3,
            num_heads=4,
            cond_token_dim=TEXT_WIDTH,
            global_cond_dim=TEXT_WIDTH,
            local_add_cond_dim=_LATENT_CHANNELS + 1,
            timestep_features_dim=16,
            ff_mult=2.0,
            num_memory_tokens=4,
        )
    )


def _pipeline(cls: Any) -> Any:
    return cls(
        vae=_vae(),
        text_encoder=t5gemma_encoder(layers=2),
        tokenizer=gemma_tokenizer(max_length=64),
        duration_embedder=ready(StableAudio3DurationEmbedder(output_dim=TEXT_WIDTH, fourier_dim=16)),
        transformer=_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _sound() -> torch.Tensor:
    """Return a sound of two tones, one a side: `[1, 2, samples]`."""
    time = torch.arange(int(_SECONDS * _RATE)) / _RATE
    return torch.stack([torch.sin(2 * torch.pi * frequency * time) for frequency in (40, 60)])[None]


_case = functools.partial(prompted_case, leave_out=("height", "width"), duration=_SECONDS)

STABLE_AUDIO_3 = _case("stable_audio_3", lambda: _pipeline(OmniStableAudio3Pipeline), seed=170, guidance_scale=3.0, negative_prompt="noise")
"""Text to sound with guidance: three blocks."""

STABLE_AUDIO_3_AUDIO_TO_AUDIO = _case(
    "stable_audio_3_audio_to_audio",
    lambda: _pipeline(OmniStableAudio3AudioToAudioPipeline),
    seed=171,
    audio=_sound(),
    init_noise_level=0.7,
)
"""Text and a sound to another sound."""

STABLE_AUDIO_3_INPAINT = _case(
    "stable_audio_3_inpaint",
    lambda: _pipeline(OmniStableAudio3InpaintPipeline),
    seed=172,
    audio=_sound(),
    mask_start_seconds=0.2,
    mask_end_seconds=0.6,
)
"""Text into the middle of a sound."""
