"""CogView cases: random weights, a few hundred thousand parameters, pictures of 64 x 64 pixels."""

import functools
from collections.abc import Callable
from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    CogView3PlusTransformer2DModel,
    CogView4Transformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)

from omni_offload.testing import PipelineCase
from pipelines.cogview4.pipeline_cogview import OmniCogView3PlusPipeline, OmniCogView4ControlPipeline, OmniCogView4Pipeline
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import SPREAD_IN_FLOAT64, TEXT_WIDTH, autoencoder_kl, ready, t5_encoder, without_spread
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.language import glm_encoder
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import qwen_tokenizer, t5_tokenizer

__all__ = ["COGVIEW3_PLUS", "COGVIEW4", "COGVIEW4_CONTROL"]

_SIZES: dict[str, Any] = {
    "patch_size": 2,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "text_embed_dim": TEXT_WIDTH,
    "time_embed_dim": 16,
    "condition_dim": 8,
}


def _cogview4(cls: type, *, in_channels: int = 4) -> Any:
    return cls(
        tokenizer=qwen_tokenizer(),
        text_encoder=glm_encoder(layers=2),
        vae=without_spread(_vae()),
        transformer=ready(CogView4Transformer2DModel(**_SIZES, in_channels=in_channels, rope_axes_dim=(16, 16), sample_size=8)),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
    )


def _cogview3_plus() -> Any:
    return OmniCogView3PlusPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(layers=2),
        vae=_vae(),
        transformer=ready(CogView3PlusTransformer2DModel(**_SIZES, in_channels=4, pos_embed_max_size=16, sample_size=8)),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"),
    )


def _vae() -> Any:
    return autoencoder_kl(widths=(8, 8, 8, 8))


def _making(seed: int, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, functools.partial(make, *arguments, **settings))


_inputs = functools.partial(prompted_inputs, negative_prompt="blurry", height=64, width=64, max_sequence_length=32)

COGVIEW4 = PipelineCase(
    name="cogview4", make_pipeline=_making(40, _cogview4, OmniCogView4Pipeline), make_inputs=_inputs(), outputs=as_tensors
)
"""Text to image with guidance: the DiT runs twice a step."""

COGVIEW4_CONTROL = PipelineCase(
    name="cogview4_control",
    make_pipeline=_making(41, _cogview4, OmniCogView4ControlPipeline, in_channels=8),
    make_inputs=_inputs(control_image=picture(width=64, height=64)),
    outputs=as_tensors,
    expected_failures=SPREAD_IN_FLOAT64,
)
"""Control picture and text to image: eight channels into the DiT."""

COGVIEW3_PLUS = PipelineCase(name="cogview3_plus", make_pipeline=_making(42, _cogview3_plus), make_inputs=_inputs(), outputs=as_tensors)
"""Text to image with guidance, both prompts in one run of the DiT."""
