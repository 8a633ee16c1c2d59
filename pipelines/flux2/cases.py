"""Flux 2 cases: random weights, a few hundred thousand parameters, pictures of 32 x 32 pixels."""

import functools
from collections.abc import Callable
from typing import Any

from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.flux2.pipeline_flux2 import (
    OmniFlux2KleinInpaintPipeline,
    OmniFlux2KleinKVPipeline,
    OmniFlux2KleinPipeline,
    OmniFlux2Pipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.language import mistral3_encoder, qwen3_encoder
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import qwen_tokenizer

__all__ = ["FLUX2", "FLUX2_KLEIN", "FLUX2_KLEIN_EDIT", "FLUX2_KLEIN_INPAINT", "FLUX2_KLEIN_KV"]

_TEXT_LAYERS = (0, 1, 2)


def _vae() -> Any:
    """Return an autoencoder with a mean and a variance of latents that matter: they begin as zeros and ones."""
    levels = 2
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    statistics: Any = vae.bn
    statistics.running_mean.normal_(std=0.3)
    statistics.running_var.uniform_(0.5, 1.5)
    return ready(vae)


def _transformer() -> Any:
    return ready(
        Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=len(_TEXT_LAYERS) * TEXT_WIDTH,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
        )
    )


def _tokenizer() -> Any:
    """Return a tokenizer that leaves out the beginning of what is too long: the instructions, and not the prompt."""
    tokenizer = qwen_tokenizer()
    tokenizer.truncation_side = "left"
    return tokenizer


def _pipeline(cls: type, text_encoder: Callable[[], Any]) -> Any:
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=text_encoder(),
        tokenizer=_tokenizer(),
        transformer=_transformer(),
    )


def _flux2(seed: int) -> Callable[[], Any]:
    encoder = functools.partial(mistral3_encoder, layers=2)
    return functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, OmniFlux2Pipeline, encoder))


def _klein(cls: type, seed: int) -> Callable[[], Any]:
    encoder = functools.partial(qwen3_encoder, layers=2, head=True)
    return functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, encoder))


def _picture() -> Any:
    """Return a picture to edit: the pipelines take none that is smaller."""
    return picture(width=64, height=64)


_inputs = functools.partial(prompted_inputs, max_sequence_length=64, text_encoder_out_layers=_TEXT_LAYERS)

FLUX2 = PipelineCase(name="flux2", make_pipeline=_flux2(30), make_inputs=_inputs(), outputs=as_tensors)
"""Text to image."""

FLUX2_KLEIN = PipelineCase(name="flux2_klein", make_pipeline=_klein(OmniFlux2KleinPipeline, 31), make_inputs=_inputs(), outputs=as_tensors)
"""Text to image with guidance: the DiT runs twice a step."""

FLUX2_KLEIN_EDIT = PipelineCase(
    name="flux2_klein_edit", make_pipeline=_klein(OmniFlux2KleinPipeline, 31), make_inputs=_inputs(image=_picture()), outputs=as_tensors
)
"""Editing a picture."""

FLUX2_KLEIN_INPAINT = PipelineCase(
    name="flux2_klein_inpaint",
    make_pipeline=_klein(OmniFlux2KleinInpaintPipeline, 32),
    make_inputs=_inputs(image=picture(), mask_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Into a masked picture: two of three steps."""

FLUX2_KLEIN_KV = PipelineCase(
    name="flux2_klein_kv", make_pipeline=_klein(OmniFlux2KleinKVPipeline, 33), make_inputs=_inputs(image=_picture()), outputs=as_tensors
)
"""Editing a picture, whose keys and values are made in the first step alone."""
