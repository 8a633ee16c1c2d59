"""Mochi cases: random weights, seven frames of 32 x 32 pixels."""

from typing import Any

from diffusers import AutoencoderKLMochi, FlowMatchEulerDiscreteScheduler, MochiTransformer3DModel

from pipelines.mochi.pipeline_mochi import OmniMochiPipeline
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready, t5_encoder
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["MOCHI"]

_LATENT_CHANNELS = 12


def _vae() -> Any:
    """Return a VAE of the least width that there is: its norms have groups of 32 channels."""
    widths = (32, 32, 32, 32)
    return ready(
        AutoencoderKLMochi(
            latent_channels=_LATENT_CHANNELS,
            out_channels=3,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            layers_per_block=(1, 1, 1, 1, 1),
        )
    )


def _transformer() -> Any:
    return ready(
        MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=3,
            pooled_projection_dim=16,
            in_channels=_LATENT_CHANNELS,
            text_embed_dim=TEXT_WIDTH,
            time_embed_dim=32,
            max_sequence_length=32,
        )
    )


def _pipeline() -> OmniMochiPipeline:
    return OmniMochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        text_encoder=t5_encoder(layers=2),
        tokenizer=t5_tokenizer(),
        transformer=_transformer(),
    )


MOCHI = prompted_case("mochi", _pipeline, seed=124, negative_prompt="blurry", num_frames=7, max_sequence_length=32)
"""Text to video: three blocks, the last of which drops the text."""
