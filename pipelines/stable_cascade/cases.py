"""Stable Cascade cases: random weights, a few ten thousand parameters a component."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDPMWuerstchenScheduler, StableCascadeUNet
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from diffusers.pipelines.pipeline_utils import DeprecatedPipelineMixin

from omni_offload.testing import PipelineCase
from pipelines.stable_cascade.pipeline_stable_cascade import (
    OmniStableCascadeCombinedPipeline,
    OmniStableCascadeDecoderPipeline,
    OmniStableCascadePriorPipeline,
)
from pipelines.tiny.components import TEXT_WIDTH, clip_image_processor, clip_text_encoder, clip_vision_encoder, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.logs import DEPRECATED, keep_back
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer

__all__ = ["COMBINED", "DECODER", "PRIOR"]

_BLOCKS: dict[str, Any] = {
    "conditioning_dim": TEXT_WIDTH,
    "block_out_channels": [8, 16],
    "clip_text_pooled_in_channels": TEXT_WIDTH,
    "dropout": [0.0, 0.0],
    "timestep_ratio_embedding_dim": 16,
}
_PRIOR_CHANNELS = 16


def _prior() -> Any:
    return ready(
        StableCascadeUNet(
            **_BLOCKS,
            in_channels=_PRIOR_CHANNELS,
            out_channels=_PRIOR_CHANNELS,
            num_attention_heads=[2, 4],
            down_num_layers_per_block=[1, 1],
            up_num_layers_per_block=[1, 1],
            down_blocks_repeat_mappers=[1, 1],
            up_blocks_repeat_mappers=[1, 1],
            switch_level=[False],
            clip_image_in_channels=TEXT_WIDTH,
            clip_text_in_channels=TEXT_WIDTH,
        )
    )


def _decoder() -> Any:
    kinds = ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]
    return ready(
        StableCascadeUNet(
            **_BLOCKS,
            in_channels=4,
            out_channels=4,
            num_attention_heads=[-1, 4],
            down_num_layers_per_block=[1, 2],
            up_num_layers_per_block=[2, 1],
            down_blocks_repeat_mappers=[1, 1],
            up_blocks_repeat_mappers=[3, 2],
            block_types_per_layer=[kinds[:2], kinds],
            effnet_in_channels=_PRIOR_CHANNELS,
            patch_size=2,
            kernel_size=3,
        )
    )


def _text_encoder() -> Any:
    return clip_text_encoder(layers=2, projects=True)


def _image_encoder() -> Any:
    return clip_vision_encoder(layers=2, projects=True)


def _vqgan() -> Any:
    return ready(PaellaVQModel(bottleneck_blocks=1, embed_dim=16, num_vq_embeddings=8))


_DECODER_PARTS: dict[str, Callable[[], Any]] = {
    "text_encoder": _text_encoder,
    "tokenizer": clip_tokenizer,
    "decoder": _decoder,
    "scheduler": DDPMWuerstchenScheduler,
    "vqgan": _vqgan,
}
_PRIOR_PARTS: dict[str, Callable[[], Any]] = {
    "text_encoder": _text_encoder,
    "tokenizer": clip_tokenizer,
    "prior": _prior,
    "scheduler": DDPMWuerstchenScheduler,
}
_IMAGE_PARTS: dict[str, Callable[[], Any]] = {"image_encoder": _image_encoder, "feature_extractor": clip_image_processor}
_COMBINED_PARTS = {**_DECODER_PARTS, **{f"prior_{name}": make for name, make in _PRIOR_PARTS.items()}}
_NO_VQGAN = {"check_save_pretrained": "diffusers saves a PaellaVQModel, but offers no class of that name to load it by"}


def _pipeline(cls: type, parts: dict[str, Callable[[], Any]]) -> Any:
    keep_back(DeprecatedPipelineMixin, DEPRECATED)
    return cls(**{name: make() for name, make in parts.items()})


def _case(name: str, cls: type, seed: int, parts: dict[str, Callable[[], Any]], **arguments: Any) -> PipelineCase:
    def make_inputs(pipeline: Any) -> dict[str, Any]:
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        common = {
            "prompt": "a red cat",
            "negative_prompt": "blurry",
            "num_inference_steps": 2,
            "output_type": "pt",
            "generator": generator(),
        }
        there = {key: tensor.to(pipeline._execution_device, pipeline.dtype) for key, tensor in tensors.items()}  # noqa: SLF001  (upstream does not)
        return {**common, **arguments, **there}

    make_pipeline = functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, parts))
    failures = _NO_VQGAN if "vqgan" in parts else {}
    return PipelineCase(name=name, make_pipeline=make_pipeline, make_inputs=make_inputs, outputs=as_tensors, expected_failures=failures)


COMBINED = _case(
    "stable_cascade",
    OmniStableCascadeCombinedPipeline,
    82,
    _COMBINED_PARTS,
    prior_num_inference_steps=2,
    height=32,
    width=32,
    decoder_guidance_scale=1.5,
)
"""Text to image: a prior, then a decoder whose upper levels run twice and three times."""

PRIOR = _case(
    "stable_cascade_prior",
    OmniStableCascadePriorPipeline,
    83,
    {**_PRIOR_PARTS, **_IMAGE_PARTS},
    images=[picture()],
    height=64,
    width=64,
)
"""Text and a picture prompt to the prior's latents."""

DECODER = _case(
    "stable_cascade_decoder",
    OmniStableCascadeDecoderPipeline,
    84,
    _DECODER_PARTS,
    image_embeddings=torch.linspace(-1, 1, _PRIOR_CHANNELS).view(1, _PRIOR_CHANNELS, 1, 1),
    guidance_scale=1.5,
)
"""The prior's latents and text to image."""
