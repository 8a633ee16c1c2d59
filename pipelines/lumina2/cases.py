"""Lumina cases: random weights, a few hundred thousand parameters, pictures of 64 x 64 pixels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Transformer2DModel, LuminaNextDiT2DModel

from omni_offload.testing import PipelineCase
from pipelines.lumina2.pipeline_lumina import OmniLumina2Pipeline, OmniLuminaPipeline
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.language import gemma2_encoder
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import gemma_tokenizer

__all__ = ["LUMINA", "LUMINA2"]

_TABLE_IS_AN_INPUT = dict.fromkeys(
    ("check_budget", "check_peak", "check_residency", "check_residents", "check_slots"),
    "upstream makes a table of 384 x 384 positions (9.4 MB) for every step, on the host: an input of the DiT larger than all weights here",
)


def _lumina2_transformer() -> Any:
    return ready(
        Lumina2Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(256, 64, 64),
            cap_feat_dim=TEXT_WIDTH,
        )
    )


def _lumina_transformer() -> Any:
    transformer = LuminaNextDiT2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=3,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=TEXT_WIDTH,
    )
    torch.nn.init.normal_(transformer.pad_token)  # upstream leaves it as memory happens to be
    return ready(transformer)


def _pipeline(cls: type, transformer: Callable[[], Any]) -> Any:
    return cls(
        transformer=transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder_kl(widths=(8, 8, 8, 8), shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=gemma2_encoder(layers=2),
        tokenizer=gemma_tokenizer(),
    )


def _making(cls: type, seed: int, transformer: Callable[[], Any]) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, transformer))


_inputs = functools.partial(prompted_inputs, negative_prompt="blurry", height=64, width=64, max_sequence_length=32)

LUMINA2 = PipelineCase(
    name="lumina2",
    make_pipeline=_making(OmniLumina2Pipeline, 38, _lumina2_transformer),
    make_inputs=_inputs(system_prompt="draw"),
    outputs=as_tensors,
)
"""Text to image with guidance: the DiT runs twice a step."""

LUMINA = PipelineCase(
    name="lumina",
    make_pipeline=_making(OmniLuminaPipeline, 39, _lumina_transformer),
    make_inputs=_inputs(clean_caption=False),
    outputs=as_tensors,
    expected_failures=_TABLE_IS_AN_INPUT,
)
"""Text to image with guidance, both prompts in one run of the DiT."""
