"""Stable Audio cases: random weights, a hundred thousand parameters, two seconds at forty samples a second."""

import functools
import warnings
from typing import Any

import torch
from diffusers import AutoencoderOobleck, EDMDPMSolverMultistepScheduler, StableAudioDiTModel
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel

from omni_offload.testing import PipelineCase
from pipelines.stable_audio.pipeline_stable_audio import OmniStableAudioPipeline
from pipelines.tiny.components import TEXT_WIDTH, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["STABLE_AUDIO"]

_CHANNELS = 4


def _vae() -> Any:
    """Return an autoencoder of waves that has run once: what its convolutions compute when they are built cannot be deep-copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # upstream uses the older kind of weight normalisation
        vae = ready(
            AutoencoderOobleck(
                encoder_hidden_size=8,
                downsampling_ratios=[2, 4],
                decoder_channels=4,
                decoder_input_channels=_CHANNELS,
                audio_channels=2,
                channel_multiples=[1, 2],
                sampling_rate=40,
            )
        )
    with torch.no_grad():
        vae(torch.zeros(1, 2, 16))
    return vae


def _transformer() -> Any:
    return ready(
        StableAudioDiTModel(
            sample_size=16,
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_attention_heads=2,
            cross_attention_dim=16,
            time_proj_dim=16,
            global_states_input_dim=2 * TEXT_WIDTH,
            cross_attention_input_dim=TEXT_WIDTH,
        )
    )


def _projection() -> Any:
    return ready(StableAudioProjectionModel(text_encoder_dim=TEXT_WIDTH, conditioning_dim=TEXT_WIDTH, min_value=0, max_value=32))


def _pipeline() -> OmniStableAudioPipeline:
    return OmniStableAudioPipeline(
        vae=_vae(),
        text_encoder=t5_encoder(layers=2),
        projection_model=_projection(),
        tokenizer=t5_tokenizer(max_length=32),
        transformer=_transformer(),
        scheduler=EDMDPMSolverMultistepScheduler(
            sigma_min=0.3,
            sigma_max=500,
            solver_order=2,
            prediction_type="v_prediction",
            sigma_data=1.0,
            sigma_schedule="exponential",
        ),
    )


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "negative_prompt": "noise",
        "audio_end_in_s": 2.0,
        "num_inference_steps": 2,
        "output_type": "pt",
        "generator": generator(),
    }


STABLE_AUDIO = PipelineCase(
    name="stable_audio", make_pipeline=functools.partial(seeded_pipeline, 27, _pipeline), make_inputs=_make_inputs, outputs=as_tensors
)
"""Text to sound with guidance: three blocks."""
