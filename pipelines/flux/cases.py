"""Flux cases: random weights, a few hundred thousand parameters."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxControlNetModel, FluxTransformer2DModel
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from omni_offload.testing import PipelineCase
from pipelines.flux.pipeline_control import OmniFluxControlImg2ImgPipeline, OmniFluxControlInpaintPipeline, OmniFluxControlPipeline
from pipelines.flux.pipeline_controlnet import (
    OmniFluxControlNetImg2ImgPipeline,
    OmniFluxControlNetInpaintPipeline,
    OmniFluxControlNetPipeline,
)
from pipelines.flux.pipeline_flux import (
    OmniFluxFillPipeline,
    OmniFluxImg2ImgPipeline,
    OmniFluxInpaintPipeline,
    OmniFluxKontextInpaintPipeline,
    OmniFluxKontextPipeline,
    OmniFluxPipeline,
)
from pipelines.flux.pipeline_redux import OmniFluxPriorReduxPipeline
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer, t5_tokenizer

__all__ = [
    "FLUX",
    "FLUX_CONTROL",
    "FLUX_CONTROLNET",
    "FLUX_CONTROLNET_IMG2IMG",
    "FLUX_CONTROLNET_INPAINT",
    "FLUX_CONTROL_IMG2IMG",
    "FLUX_CONTROL_INPAINT",
    "FLUX_FILL",
    "FLUX_IMG2IMG",
    "FLUX_INPAINT",
    "FLUX_KONTEXT",
    "FLUX_KONTEXT_INPAINT",
    "FLUX_MULTI_CONTROLNET",
    "FLUX_PRIOR_REDUX",
]

_BLOCKS: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "pooled_projection_dim": TEXT_WIDTH,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}


def _transformer(**sizes: int) -> Any:
    return ready(FluxTransformer2DModel(**{**_BLOCKS, "num_layers": 3, "num_single_layers": 4, **sizes}))


def _controlnet() -> Any:
    """Return a ControlNet; `ready` fills its projections, which begin as zeros, with noise: it would have no effect otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # upstream uses a name that it has deprecated
        return ready(FluxControlNetModel(**_BLOCKS, num_layers=2, num_single_layers=2))


def _pipeline(cls: type, *, vae: Any, transformer: Any, **parts: Any) -> Any:
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=clip_text_encoder(layers=2),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(layers=2),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
        **parts,
    )


def _flux() -> Any:
    return _pipeline(OmniFluxPipeline, vae=_vae(), transformer=_transformer())


def _vae() -> Any:
    return autoencoder_kl(widths=(8, 16), shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False)


def _small(cls: type, seed: int, *, controlnets: int = 0, **channels: int) -> Callable[[], Any]:
    """Return what makes a pipeline of two blocks of each kind."""

    def make_pipeline() -> Any:
        transformer = _transformer(num_layers=2, num_single_layers=2, **channels)
        nets = [_controlnet() for _ in range(controlnets)]
        parts = {"controlnet": nets if len(nets) > 1 else nets[0]} if nets else {}
        return _pipeline(cls, vae=_vae(), transformer=transformer, **parts)

    return functools.partial(seeded_pipeline, seed, make_pipeline)


def _seeing(cls: type, seed: int, *, more: int) -> Callable[[], Any]:
    """Return what makes a pipeline whose DiT sees further channels beside the latents."""
    latent = _BLOCKS["in_channels"]
    return _small(cls, seed, in_channels=latent + more, out_channels=latent)


def _redux() -> Any:
    size = 32
    vision = SiglipVisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=size,
        patch_size=8,
    )
    return OmniFluxPriorReduxPipeline(
        image_encoder=ready(SiglipVisionModel(vision)),
        feature_extractor=SiglipImageProcessor(size={"height": size, "width": size}),
        image_embedder=ready(ReduxImageEncoder(redux_dim=TEXT_WIDTH, txt_in_features=TEXT_WIDTH)),
        text_encoder=clip_text_encoder(layers=2),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(layers=2),
        tokenizer_2=t5_tokenizer(),
    )


_inputs = functools.partial(prompted_inputs, guidance_scale=3.5, max_sequence_length=32)

FLUX = PipelineCase(
    name="flux",
    make_pipeline=functools.partial(seeded_pipeline, 0, _flux),
    make_inputs=_inputs(),
    outputs=as_tensors,
)
"""Text to image: three double and four single blocks."""

FLUX_IMG2IMG = PipelineCase(
    name="flux_img2img",
    make_pipeline=_small(OmniFluxImg2ImgPipeline, 21),
    make_inputs=_inputs(image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture and text to image: two of three steps."""

FLUX_KONTEXT = PipelineCase(
    name="flux_kontext",
    make_pipeline=_small(OmniFluxKontextPipeline, 22),
    make_inputs=_inputs(image=picture(), max_area=32 * 32, _auto_resize=False, negative_prompt="blurry", true_cfg_scale=2.0),
    outputs=as_tensors,
)
"""Editing a picture, with negative prompts: both encoders run twice."""

FLUX_CONTROLNET = PipelineCase(
    name="flux_controlnet",
    make_pipeline=_small(OmniFluxControlNetPipeline, 23, controlnets=1),
    make_inputs=_inputs(control_image=picture(), controlnet_conditioning_scale=0.7),
    outputs=as_tensors,
)
"""Control picture and text to image."""

FLUX_MULTI_CONTROLNET = PipelineCase(
    name="flux_multi_controlnet",
    make_pipeline=_small(OmniFluxControlNetPipeline, 24, controlnets=2),
    make_inputs=_inputs(control_image=[picture(), picture()], control_mode=[None, None], controlnet_conditioning_scale=[0.7, 0.4]),
    outputs=as_tensors,
    expected_failures=dict.fromkeys(
        ("check_save", "check_save_pretrained"),
        "diffusers' FluxMultiControlNetModel has no save_config, so that no such pipeline can be saved",
    ),
)
"""Two control pictures and text to image."""

FLUX_INPAINT = PipelineCase(
    name="flux_inpaint",
    make_pipeline=_small(OmniFluxInpaintPipeline, 60),
    make_inputs=_inputs(image=picture(), mask_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Into a masked picture: two of three steps."""

FLUX_FILL = PipelineCase(
    name="flux_fill",
    make_pipeline=_seeing(OmniFluxFillPipeline, 61, more=32),
    make_inputs=_inputs(image=picture(), mask_image=picture()),
    outputs=as_tensors,
)
"""Into a masked picture, with a DiT that sees mask and picture."""

FLUX_KONTEXT_INPAINT = PipelineCase(
    name="flux_kontext_inpaint",
    make_pipeline=_small(OmniFluxKontextInpaintPipeline, 62),
    make_inputs=_inputs(image=picture(), mask_image=picture(), max_area=32 * 32, _auto_resize=False, strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Editing a picture within a mask: two of three steps."""

FLUX_CONTROL = PipelineCase(
    name="flux_control",
    make_pipeline=_seeing(OmniFluxControlPipeline, 63, more=16),
    make_inputs=_inputs(control_image=picture()),
    outputs=as_tensors,
)
"""Control picture and text to image, with a DiT that sees the picture."""

FLUX_CONTROL_IMG2IMG = PipelineCase(
    name="flux_control_img2img",
    make_pipeline=_seeing(OmniFluxControlImg2ImgPipeline, 64, more=16),
    make_inputs=_inputs(image=picture(), control_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""The same from a picture: two of three steps."""

FLUX_CONTROL_INPAINT = PipelineCase(
    name="flux_control_inpaint",
    make_pipeline=_seeing(OmniFluxControlInpaintPipeline, 65, more=16),
    make_inputs=_inputs(image=picture(), mask_image=picture(), control_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""The same into a masked picture: two of three steps."""

FLUX_CONTROLNET_IMG2IMG = PipelineCase(
    name="flux_controlnet_img2img",
    make_pipeline=_small(OmniFluxControlNetImg2ImgPipeline, 66, controlnets=1),
    make_inputs=_inputs(image=picture(), control_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture, control picture and text to image: two of three steps."""

FLUX_CONTROLNET_INPAINT = PipelineCase(
    name="flux_controlnet_inpaint",
    make_pipeline=_small(OmniFluxControlNetInpaintPipeline, 67, controlnets=1),
    make_inputs=_inputs(image=picture(), mask_image=picture(), control_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Into a masked picture, with a control picture: two of three steps."""

FLUX_PRIOR_REDUX = PipelineCase(
    name="flux_prior_redux",
    make_pipeline=functools.partial(seeded_pipeline, 68, _redux),
    make_inputs=lambda _pipeline: {"prompt": "a red cat", "image": picture()},
    outputs=as_tensors,
)
"""Picture and text to prompt embeddings."""
