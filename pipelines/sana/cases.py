"""Sana cases: random weights, a few ten thousand parameters a component."""

import functools
from collections.abc import Callable
from typing import Any

from diffusers import (
    AutoencoderDC,
    FlowMatchEulerDiscreteScheduler,
    SanaControlNetModel,
    SanaTransformer2DModel,
    SCMScheduler,
)

from omni_offload.testing import PipelineCase
from pipelines.sana.pipeline_sana import (
    OmniSanaControlNetPipeline,
    OmniSanaPAGPipeline,
    OmniSanaPipeline,
    OmniSanaSprintImg2ImgPipeline,
    OmniSanaSprintPipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.language import gemma2_encoder
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import gemma_tokenizer

__all__ = ["SANA", "SANA_CONTROLNET", "SANA_PAG", "SANA_SPRINT", "SANA_SPRINT_IMG2IMG"]

_BLOCKS: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 32,
    "caption_channels": TEXT_WIDTH,
    "sample_size": 8,
    "patch_size": 1,
}


def _transformer(**settings: Any) -> Any:
    return ready(SanaTransformer2DModel(**_BLOCKS, num_layers=3, **settings))


def _sprint_transformer() -> Any:
    return _transformer(guidance_embeds=True, qk_norm="rms_norm_across_heads")


def _controlnet() -> Any:
    """Return a ControlNet; `ready` fills its projections, which begin as zeros, with noise: it would have no effect otherwise."""
    return ready(SanaControlNetModel(**_BLOCKS, num_layers=2))


def _vae() -> Any:
    levels, multiples = ("ResBlock", "ResBlock", "EfficientViTBlock"), ((), (), (5,))
    return ready(
        AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types=levels,
            decoder_block_types=levels,
            encoder_block_out_channels=(8, 8, 16),
            decoder_block_out_channels=(8, 8, 16),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=multiples,
            decoder_qkv_multiscales=multiples,
            decoder_norm_types=["rms_norm"] * 3,
            decoder_act_fns=["silu"] * 3,
            upsample_block_type="interpolate",
            downsample_block_type="pixel_unshuffle",
        )
    )


def _pipeline(cls: type, parts: dict[str, Callable[[], Any]]) -> Any:
    defaults: dict[str, Callable[[], Any]] = {
        "transformer": _transformer,
        "scheduler": functools.partial(FlowMatchEulerDiscreteScheduler, shift=3.0),
    }
    made = {name: make() for name, make in {**defaults, **parts}.items()}
    return cls(tokenizer=gemma_tokenizer(), text_encoder=gemma2_encoder(layers=2), vae=_vae(), **made)


_inputs = functools.partial(prompted_inputs, max_sequence_length=16, complex_human_instruction=None, use_resolution_binning=False)


def _case(name: str, cls: type, seed: int, arguments: dict[str, Any], **parts: Callable[[], Any]) -> PipelineCase:
    make_pipeline = functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, parts))
    return PipelineCase(
        name=name,
        make_pipeline=make_pipeline,
        make_inputs=_inputs(**arguments),
        outputs=as_tensors,
    )


_SPRINT: dict[str, Callable[[], Any]] = {"transformer": _sprint_transformer, "scheduler": SCMScheduler}

SANA = _case("sana", OmniSanaPipeline, 43, {"negative_prompt": "blurry"})
"""Text to image with guidance: three blocks."""

SANA_PAG = _case("sana_pag", OmniSanaPAGPipeline, 44, {"negative_prompt": "blurry", "pag_scale": 2.0})
"""Text to image with both kinds of guidance."""

SANA_SPRINT = _case("sana_sprint", OmniSanaSprintPipeline, 45, {}, **_SPRINT)
"""Text to image in two steps, with guidance as an input of the DiT."""

SANA_SPRINT_IMG2IMG = _case("sana_sprint_img2img", OmniSanaSprintImg2ImgPipeline, 46, {"image": picture()}, **_SPRINT)
"""Picture and text to image in two steps."""

SANA_CONTROLNET = _case(
    "sana_controlnet",
    OmniSanaControlNetPipeline,
    47,
    {"negative_prompt": "blurry", "control_image": picture(), "controlnet_conditioning_scale": 0.7},
    controlnet=_controlnet,
)
"""Control picture and text to image."""
