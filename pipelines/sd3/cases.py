"""Stable Diffusion 3 cases: random weights, a few hundred thousand parameters."""

import functools
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.sd3.pipeline_sd3 import OmniStableDiffusion3Pipeline
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer, t5_tokenizer

__all__ = ["SD3"]

_BOTH_CLIPS = 2 * TEXT_WIDTH  # their outputs stand side by side; T5's is as wide


def _transformer() -> Any:
    return ready(
        SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=_BOTH_CLIPS,
            caption_projection_dim=32,
            pooled_projection_dim=_BOTH_CLIPS,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
    )


def _pipeline() -> OmniStableDiffusion3Pipeline:
    return OmniStableDiffusion3Pipeline(
        transformer=_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder_kl(widths=(8, 16), use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        text_encoder=clip_text_encoder(layers=2, projects=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text_encoder(layers=2, projects=True, hidden_act="gelu"),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(layers=2, width=_BOTH_CLIPS),
        tokenizer_3=t5_tokenizer(),
    )


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "negative_prompt": "blurry",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "max_sequence_length": 32,
        "output_type": "pt",
        "generator": generator(),
    }


SD3 = PipelineCase(
    name="sd3", make_pipeline=functools.partial(seeded_pipeline, 20, _pipeline), make_inputs=_make_inputs, outputs=as_tensors
)
"""Text to image with guidance: three encoders, of two layers each, and three blocks."""
