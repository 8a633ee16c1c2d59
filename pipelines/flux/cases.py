"""Flux cases: random weights, a few hundred thousand parameters."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.flux.pipeline_flux import OmniFluxPipeline
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded
from pipelines.tiny.tokenizers import clip_tokenizer, t5_tokenizer

__all__ = ["FLUX"]


def _transformer() -> Any:
    return ready(
        FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=3,
            num_single_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )
    )


def _make_pipeline() -> OmniFluxPipeline:
    with seeded(0):
        pipeline = OmniFluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=autoencoder_kl(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
            text_encoder=clip_text_encoder(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5_encoder(),
            tokenizer_2=t5_tokenizer(),
            transformer=_transformer(),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "height": 64,
        "width": 64,
        "num_inference_steps": 3,
        "guidance_scale": 3.5,
        "max_sequence_length": 32,
        "output_type": "pt",
        "generator": generator(),
    }


FLUX = PipelineCase(name="flux", make_pipeline=_make_pipeline, make_inputs=_make_inputs, outputs=as_tensors)
"""Text to image: three double and four single blocks."""
