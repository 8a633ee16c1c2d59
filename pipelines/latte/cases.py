"""Latte cases: random weights, a few hundred thousand parameters, four frames of 16 x 16 pixels."""

import functools
from typing import Any

from diffusers import DDIMScheduler, LatteTransformer3DModel

from omni_offload.testing import PipelineCase
from pipelines.latte.pipeline_latte import OmniLattePipeline
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["LATTE"]

_FRAMES = 4


def _transformer() -> Any:
    return ready(
        LatteTransformer3DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=TEXT_WIDTH,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            video_length=_FRAMES,
        )
    )


def _pipeline() -> OmniLattePipeline:
    return OmniLattePipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(layers=2),
        vae=autoencoder_kl(widths=(8, 16)),
        transformer=_transformer(),
        scheduler=DDIMScheduler(),
    )


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "negative_prompt": "blurry",
        "height": 16,
        "width": 16,
        "video_length": _FRAMES,
        "num_inference_steps": 2,
        "clean_caption": False,
        "output_type": "pt",
        "generator": generator(),
    }


LATTE = PipelineCase(
    name="latte", make_pipeline=functools.partial(seeded_pipeline, 52, _pipeline), make_inputs=_make_inputs, outputs=as_tensors
)
"""Text to video with guidance: two spatial and two temporal blocks."""
