"""Amused cases: random weights, a few ten thousand parameters a component."""

import functools
from typing import Any

from diffusers import AmusedScheduler, UVit2DModel, VQModel
from diffusers.pipelines.pipeline_utils import DeprecatedPipelineMixin
from PIL import Image

from omni_offload.testing import PipelineCase
from pipelines.amused.pipeline_amused import (
    OmniAmusedImg2ImgPipeline,
    OmniAmusedInpaintPipeline,
    OmniAmusedPipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, clip_text_encoder, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.logs import DEPRECATED, keep_back
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer

__all__ = ["AMUSED", "AMUSED_IMG2IMG", "AMUSED_INPAINT"]

_CODES = 24


def _transformer() -> Any:
    return ready(
        UVit2DModel(
            hidden_size=16,
            cond_embed_dim=TEXT_WIDTH,
            micro_cond_encode_dim=8,
            micro_cond_embed_dim=5 * 8,
            encoder_hidden_size=TEXT_WIDTH,
            vocab_size=_CODES + 8,
            codebook_size=_CODES,
            in_channels=16,
            block_out_channels=16,
            num_res_blocks=1,
            downsample=True,
            upsample=True,
            block_num_heads=2,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )


def _vqvae() -> Any:
    return ready(
        VQModel(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=8,
            layers_per_block=1,
            norm_num_groups=8,
            num_vq_embeddings=_CODES,
            sample_size=32,
            mid_block_add_attention=False,
            lookup_from_codebook=True,
        )
    )


def _pipeline(cls: type) -> Any:
    keep_back(DeprecatedPipelineMixin, DEPRECATED)
    return cls(
        vqvae=_vqvae(),
        tokenizer=clip_tokenizer(),
        text_encoder=clip_text_encoder(layers=2, projects=True),
        transformer=_transformer(),
        scheduler=AmusedScheduler(mask_token_id=_CODES + 7),
    )


_inputs = functools.partial(prompted_inputs, leave_out=("height", "width"), negative_prompt="blurry")


def _case(name: str, cls: type, seed: int, **arguments: Any) -> PipelineCase:
    make_pipeline = functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls))
    return PipelineCase(name=name, make_pipeline=make_pipeline, make_inputs=_inputs(**arguments), outputs=as_tensors)


def _mask() -> Image.Image:
    """Return a mask of the lower half."""
    mask = Image.new("L", (16, 16))
    mask.paste(255, (0, 8, 16, 16))
    return mask


AMUSED = _case("amused", OmniAmusedPipeline, 54, height=16, width=16)
"""Text to image with guidance: three layers between a level down and one up."""

AMUSED_IMG2IMG = _case(
    "amused_img2img",
    OmniAmusedImg2ImgPipeline,
    55,
    image=picture(width=16, height=16),
    strength=0.7,
    num_inference_steps=3,
)
"""Picture and text to image: two of three steps."""

AMUSED_INPAINT = _case(
    "amused_inpaint", OmniAmusedInpaintPipeline, 56, image=picture(width=16, height=16), mask_image=_mask(), strength=0.9
)
"""Into a masked picture."""
