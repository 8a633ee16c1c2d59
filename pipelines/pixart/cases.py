"""PixArt cases: random weights, a few ten thousand parameters a component."""

import functools
from typing import Any

from diffusers import DDIMScheduler, PixArtTransformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.pixart.pipeline_pixart import (
    OmniPixArtAlphaPipeline,
    OmniPixArtSigmaPAGPipeline,
    OmniPixArtSigmaPipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["ALPHA", "SIGMA", "SIGMA_PAG"]


def _transformer() -> Any:
    return ready(
        PixArtTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=3,
            norm_num_groups=8,
            cross_attention_dim=32,
            sample_size=16,
            patch_size=2,
            caption_channels=TEXT_WIDTH,
            use_additional_conditions=False,
        )
    )


def _pipeline(cls: type) -> Any:
    return cls(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(layers=2),
        vae=autoencoder_kl(widths=(8, 16)),
        transformer=_transformer(),
        scheduler=DDIMScheduler(),
    )


_inputs = functools.partial(
    prompted_inputs, negative_prompt="blurry", max_sequence_length=32, use_resolution_binning=False, clean_caption=False
)


def _case(name: str, cls: type, seed: int, **arguments: Any) -> PipelineCase:
    make_pipeline = functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls))
    return PipelineCase(name=name, make_pipeline=make_pipeline, make_inputs=_inputs(**arguments), outputs=as_tensors)


SIGMA = _case("pixart_sigma", OmniPixArtSigmaPipeline, 40)
"""Text to image with guidance: three blocks."""

ALPHA = _case("pixart_alpha", OmniPixArtAlphaPipeline, 41)
"""Text to image by the older model."""

SIGMA_PAG = _case("pixart_sigma_pag", OmniPixArtSigmaPAGPipeline, 42, pag_scale=2.0)
"""Text to image with both kinds of guidance."""
