"""DiT cases: random weights, a few hundred thousand parameters."""

import functools
from typing import Any

from diffusers import DDIMScheduler, DiTTransformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.dit.pipeline_dit import OmniDiTPipeline
from pipelines.tiny.components import autoencoder_kl, ready
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline

__all__ = ["DIT"]


def _transformer() -> Any:
    return ready(
        DiTTransformer2DModel(
            sample_size=8,
            num_layers=3,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            in_channels=4,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_zero",
            norm_elementwise_affine=False,
        )
    )


def _pipeline() -> OmniDiTPipeline:
    return OmniDiTPipeline(transformer=_transformer(), vae=autoencoder_kl(widths=(8, 16)), scheduler=DDIMScheduler())


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {"class_labels": [1, 7], "num_inference_steps": 2, "output_type": "pt", "generator": generator()}


DIT = PipelineCase(
    name="dit", make_pipeline=functools.partial(seeded_pipeline, 51, _pipeline), make_inputs=_make_inputs, outputs=as_tensors
)
"""Images of two classes with guidance: three blocks, each with an embedding of its own of a thousand classes."""
