"""PRX cases: random weights, about a hundred thousand parameters, pictures of 32 x 32 pixels."""

import functools
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, PRXTransformer2DModel

from pipelines.prx.pipeline_prx import OmniPRXPipeline, OmniPRXPixelPipeline
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready
from pipelines.tiny.language import qwen3_encoder, t5gemma_encoder
from pipelines.tiny.tokenizers import gemma_tokenizer, qwen_tokenizer

__all__ = ["PRX", "PRX_PIXEL"]


def _transformer(**settings: Any) -> Any:
    return ready(
        PRXTransformer2DModel(context_in_dim=TEXT_WIDTH, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=3, axes_dim=[8, 8], **settings)
    )


def _text_encoder() -> Any:
    """Return the encoder of a T5Gemma, whose configuration holds its own once more: what upstream loads is that of encoder and decoder."""
    encoder = t5gemma_encoder().encoder
    encoder.config.encoder = encoder.config.to_dict()
    return encoder


def _latent() -> Any:
    return OmniPRXPipeline(
        transformer=_transformer(in_channels=4),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=_text_encoder(),
        tokenizer=gemma_tokenizer(max_length=32),
        vae=autoencoder_kl(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
    )


def _pixel() -> Any:
    return OmniPRXPixelPipeline(
        transformer=_transformer(in_channels=3, patch_size=4, bottleneck_size=8, resolution_embeds=True),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=qwen3_encoder(),
        tokenizer=qwen_tokenizer(),
        prompt_max_tokens=32,
    )


_case = functools.partial(prompted_case, negative_prompt="blurry", use_resolution_binning=False)

PRX = _case("prx", _latent, seed=262)
"""Text to image with guidance, both prompts in one run of the DiT: three blocks."""

PRX_PIXEL = _case("prx_pixel", _pixel, seed=263)
"""Text to pixels with guidance."""
