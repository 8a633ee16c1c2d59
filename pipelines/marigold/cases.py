"""Marigold cases: random weights, a few ten thousand parameters a component, pictures of 16 x 16 pixels."""

import functools
from typing import Any

from diffusers import DDIMScheduler

from omni_offload.testing import PipelineCase
from pipelines.marigold.pipeline_marigold import (
    OmniMarigoldDepthPipeline,
    OmniMarigoldIntrinsicsPipeline,
    OmniMarigoldNormalsPipeline,
)
from pipelines.tiny.components import autoencoder_kl, clip_text_encoder
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import unet_2d

__all__ = ["DEPTH", "INTRINSICS", "NORMALS"]


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "image": picture(width=16, height=16),
        "num_inference_steps": 2,
        "processing_resolution": 0,
        "output_type": "pt",
        "generator": generator(),
    }


def _case(name: str, cls: type, seed: int, *, targets: int = 1, **settings: Any) -> PipelineCase:
    def make_pipeline() -> Any:
        return cls(
            unet=unet_2d(in_channels=4 + 4 * targets, out_channels=4 * targets),  # the picture, and what it is looked at for
            vae=autoencoder_kl(widths=(8, 16)),
            scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
            text_encoder=clip_text_encoder(layers=2),
            tokenizer=clip_tokenizer(),
            **settings,
        )

    make = functools.partial(seeded_pipeline, seed, make_pipeline)
    return PipelineCase(name=f"marigold_{name}", make_pipeline=make, make_inputs=_make_inputs, outputs=as_tensors)


DEPTH = _case("depth", OmniMarigoldDepthPipeline, 104, prediction_type="depth")
"""Picture to depth."""

NORMALS = _case("normals", OmniMarigoldNormalsPipeline, 105, prediction_type="normals")
"""Picture to normals."""

INTRINSICS = _case(
    "intrinsics",
    OmniMarigoldIntrinsicsPipeline,
    106,
    targets=2,
    prediction_type="intrinsics",
    target_properties={"target_names": ["albedo", "roughness"]},
)
"""Picture to albedo and roughness."""
