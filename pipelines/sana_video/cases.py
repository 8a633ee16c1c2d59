"""Sana Video cases: random weights, a hundred thousand parameters, five frames of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SanaVideoTransformer3DModel

from pipelines.sana_video.pipeline_sana_video import OmniSanaImageToVideoPipeline, OmniSanaVideoPipeline
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.inputs import picture
from pipelines.tiny.language import gemma2_encoder
from pipelines.tiny.tokenizers import gemma_tokenizer
from pipelines.tiny.videos import WAN_LATENT_CHANNELS, autoencoder_wan

__all__ = ["SANA_IMAGE_TO_VIDEO", "SANA_VIDEO"]


def _pipeline(cls: Any) -> Any:
    transformer = SanaVideoTransformer3DModel(
        in_channels=WAN_LATENT_CHANNELS,
        out_channels=WAN_LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=3,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=TEXT_WIDTH,
        sample_size=4,
        rope_max_seq_len=32,
    )
    return cls(
        tokenizer=gemma_tokenizer(),
        text_encoder=gemma2_encoder(layers=2),
        vae=autoencoder_wan(),
        transformer=ready(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


_case = functools.partial(
    prompted_case,
    negative_prompt="blurry",
    frames=5,
    max_sequence_length=16,
    complex_human_instruction=None,
    use_resolution_binning=False,
)

SANA_VIDEO = _case("sana_video", lambda: _pipeline(OmniSanaVideoPipeline), seed=173)
"""Text to video: three blocks."""

SANA_IMAGE_TO_VIDEO = _case(
    "sana_i2v",
    lambda: _pipeline(OmniSanaImageToVideoPipeline),
    seed=174,
    image=picture(),
)
"""Text and the first frame to video, with a time of its own for each token."""
