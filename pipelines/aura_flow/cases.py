"""AuraFlow cases: random weights, a few hundred thousand parameters, pictures of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

from omni_offload.testing import PipelineCase
from pipelines.aura_flow.pipeline_aura_flow import OmniAuraFlowPipeline
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready, umt5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["AURA_FLOW"]


def _transformer() -> Any:
    return ready(
        AuraFlowTransformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            caption_projection_dim=16,
            pos_embed_max_size=64,
        )
    )


def _pipeline() -> OmniAuraFlowPipeline:
    return OmniAuraFlowPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(layers=2),
        vae=autoencoder_kl(widths=(8, 16)),
        transformer=_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "negative_prompt": "blurry",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "max_sequence_length": 32,
        "output_type": "pt",
        "generator": generator(),
    }


AURA_FLOW = PipelineCase(
    name="aura_flow", make_pipeline=functools.partial(seeded_pipeline, 34, _pipeline), make_inputs=_make_inputs, outputs=as_tensors
)
"""Text to image with guidance, both prompts in one run of the DiT: two blocks of each kind."""
