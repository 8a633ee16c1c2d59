"""Qwen-Image cases: random weights, a few hundred thousand parameters."""

import functools
from typing import Any

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.qwen_image.pipeline_qwen_image import OmniQwenImagePipeline, forget_positions
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.language import qwen25_vl_encoder
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import qwen_tokenizer

__all__ = ["QWEN_IMAGE"]


def _vae() -> Any:
    return ready(
        AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, -0.4],
            latents_std=[1.5, 0.75, 2.0, 1.25],
        )
    )


def _transformer() -> Any:
    return ready(
        QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        )
    )


def _pipeline() -> OmniQwenImagePipeline:
    forget_positions()  # of whatever ran before in this process
    return OmniQwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=qwen25_vl_encoder(layers=2),
        tokenizer=qwen_tokenizer(),
        transformer=_transformer(),
    )


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "negative_prompt": "blurry",
        "true_cfg_scale": 2.0,
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "max_sequence_length": 256,
        "output_type": "pt",
        "generator": generator(),
    }


QWEN_IMAGE = PipelineCase(
    name="qwen_image", make_pipeline=functools.partial(seeded_pipeline, 25, _pipeline), make_inputs=_make_inputs, outputs=as_tensors
)
"""Text to image with negative prompts: three blocks, each run twice a step."""
