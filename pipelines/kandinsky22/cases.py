"""Kandinsky 2.2 cases: random weights, a few ten thousand parameters a component, pictures of 16 x 16 pixels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDIMScheduler, UnCLIPScheduler, UNet2DConditionModel, VQModel

from omni_offload.testing import PipelineCase
from pipelines.kandinsky22.pipeline_combined import (
    OmniKandinskyV22CombinedPipeline,
    OmniKandinskyV22Img2ImgCombinedPipeline,
    OmniKandinskyV22InpaintCombinedPipeline,
)
from pipelines.kandinsky22.pipeline_decoder import (
    OmniKandinskyV22ControlnetImg2ImgPipeline,
    OmniKandinskyV22ControlnetPipeline,
    OmniKandinskyV22Img2ImgPipeline,
    OmniKandinskyV22InpaintPipeline,
    OmniKandinskyV22Pipeline,
)
from pipelines.kandinsky22.pipeline_prior import OmniKandinskyV22PriorEmb2EmbPipeline, OmniKandinskyV22PriorPipeline
from pipelines.tiny.components import TEXT_WIDTH, clip_image_processor, clip_text_encoder, clip_vision_encoder, prior_transformer, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer

__all__ = [
    "COMBINED",
    "CONTROLNET",
    "CONTROLNET_IMG2IMG",
    "DECODER",
    "IMG2IMG",
    "IMG2IMG_COMBINED",
    "INPAINT",
    "INPAINT_COMBINED",
    "PRIOR",
    "PRIOR_EMB2EMB",
]

_SIZE = 16
_PICTURE = picture(width=_SIZE, height=_SIZE)


def _unet(**settings: Any) -> Any:
    defaults = {
        "in_channels": 4,
        "out_channels": 8,
        "addition_embed_type": "image",
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "encoder_hid_dim": TEXT_WIDTH,
        "encoder_hid_dim_type": "image_proj",
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
        "resnet_time_scale_shift": "scale_shift",
        "norm_num_groups": 4,
    }
    return ready(UNet2DConditionModel(**{**defaults, **settings}))


def _movq() -> Any:
    return ready(
        VQModel(
            block_out_channels=(32, 32),  # its norms have groups of 32
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=8,
            norm_type="spatial",
            num_vq_embeddings=12,
            vq_embed_dim=4,
        )
    )


def _decoder_parts(**settings: Any) -> dict[str, Any]:
    scheduler = DDIMScheduler(beta_schedule="linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    return {"unet": _unet(**settings), "scheduler": scheduler, "movq": _movq()}


def _prior_parts() -> dict[str, Any]:
    return {
        "prior": prior_transformer(),
        "image_encoder": clip_vision_encoder(layers=2, projects=True),
        "text_encoder": clip_text_encoder(layers=2, projects=True),
        "tokenizer": clip_tokenizer(),
        "scheduler": UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0),
        "image_processor": clip_image_processor(),
    }


def _combined_parts(**settings: Any) -> dict[str, Any]:
    return {**_decoder_parts(**settings), **{f"prior_{name}": part for name, part in _prior_parts().items()}}


_SCHEDULER_STAYS = "upstream's scheduler keeps its alphas where it added noise last, also where the next call runs elsewhere"
_RUNS_ELSEWHERE = dict.fromkeys(("check_cycles", "check_user_hooks"), _SCHEDULER_STAYS)


def _case(name: str, cls: type, seed: int, parts: Callable[[], dict[str, Any]], **arguments: Any) -> PipelineCase:
    def make_inputs(_pipeline: Any) -> dict[str, Any]:
        return {"num_inference_steps": 2, "output_type": "pt", "generator": generator(), **arguments}

    make_pipeline = functools.partial(seeded_pipeline, seed, lambda: cls(**parts()))
    return PipelineCase(
        name=name,
        make_pipeline=make_pipeline,
        make_inputs=make_inputs,
        outputs=as_tensors,
        expected_failures=_RUNS_ELSEWHERE if "mask_image" in arguments else {},  # noise is added after each step then
    )


_TEXTS = {"prompt": "a red cat", "negative_prompt": "blurry"}
_STEPS = {
    "prior_num_inference_steps": 2,
    "height": _SIZE,
    "width": _SIZE,
    "callback_steps": None,  # by default it is a number, which upstream hands on and warns of
}
_EMBEDS = {
    "image_embeds": torch.linspace(-1, 1, TEXT_WIDTH)[None],
    "negative_image_embeds": torch.linspace(1, -1, TEXT_WIDTH)[None].square(),
    "height": _SIZE,
    "width": _SIZE,
}
_HINT = torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64)  # its encoder has an eighth of the height and width
_MASKED = functools.partial(_decoder_parts, in_channels=9)
_HINTED = functools.partial(_decoder_parts, in_channels=8, addition_embed_type="image_hint")

COMBINED = _case("kandinsky22", OmniKandinskyV22CombinedPipeline, 72, _combined_parts, **_TEXTS, **_STEPS)
"""Text to image: text encoder, prior, image encoder, UNet and decoder, one after the other."""

IMG2IMG_COMBINED = _case(
    "kandinsky22_img2img_combined",
    OmniKandinskyV22Img2ImgCombinedPipeline,
    73,
    _combined_parts,
    **_TEXTS,
    **_STEPS,
    image=_PICTURE,
    strength=1.0,
)
"""Picture and text to image."""

INPAINT_COMBINED = _case(
    "kandinsky22_inpaint_combined",
    OmniKandinskyV22InpaintCombinedPipeline,
    74,
    functools.partial(_combined_parts, in_channels=9),
    **_TEXTS,
    **_STEPS,
    image=_PICTURE,
    mask_image=_PICTURE,
)
"""Text into a masked picture."""

PRIOR = _case("kandinsky22_prior", OmniKandinskyV22PriorPipeline, 75, _prior_parts, prompt="a red cat")
"""Text to image embeddings; without a negative prompt the image encoder runs for an empty picture."""

PRIOR_EMB2EMB = _case(
    "kandinsky22_prior_emb2emb",
    OmniKandinskyV22PriorEmb2EmbPipeline,
    76,
    _prior_parts,
    prompt="a red cat",
    image=picture(),
    strength=1.0,
)
"""Text and a picture to image embeddings."""

DECODER = _case("kandinsky22_decoder", OmniKandinskyV22Pipeline, 77, _decoder_parts, **_EMBEDS)
"""Image embeddings to image."""

IMG2IMG = _case("kandinsky22_img2img", OmniKandinskyV22Img2ImgPipeline, 78, _decoder_parts, **_EMBEDS, image=_PICTURE, strength=1.0)
"""Image embeddings and a picture to image."""

INPAINT = _case("kandinsky22_inpaint", OmniKandinskyV22InpaintPipeline, 79, _MASKED, **_EMBEDS, image=_PICTURE, mask_image=_PICTURE)
"""Image embeddings into a masked picture."""

CONTROLNET = _case("kandinsky22_controlnet", OmniKandinskyV22ControlnetPipeline, 80, _HINTED, **_EMBEDS, hint=_HINT)
"""Image embeddings and a control picture to image."""

CONTROLNET_IMG2IMG = _case(
    "kandinsky22_controlnet_img2img",
    OmniKandinskyV22ControlnetImg2ImgPipeline,
    81,
    _HINTED,
    **_EMBEDS,
    hint=_HINT,
    image=_PICTURE,
    strength=1.0,
)
"""Image embeddings, a picture and a control picture to image."""
