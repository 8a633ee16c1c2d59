"""Builders of single components, a few ten thousand parameters each, in evaluation mode.

Weights are drawn from the CPU's generator: call the builders inside `seeded`.
"""

from typing import Any

import torch
from diffusers import AutoencoderKL, PriorTransformer
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from pipelines.tiny.seeding import fill_constants
from pipelines.tiny.tokenizers import CLIP_BOS, CLIP_EOS, CLIP_VOCABULARY_SIZE, T5_VOCABULARY_SIZE

__all__ = [
    "SPREAD_IN_FLOAT64",
    "TEXT_WIDTH",
    "autoencoder_kl",
    "clip_image_processor",
    "clip_text_encoder",
    "clip_vision_encoder",
    "prior_transformer",
    "ready",
    "siglip_image_processor",
    "siglip_vision_encoder",
    "t5_encoder",
    "umt5_encoder",
    "without_spread",
]

TEXT_WIDTH = 32
"""Hidden size of every tiny encoder."""

_LARGE = 64.0
"""A mean beside which a deviation of 3e-7 is lost: half of the distance to the next number is 4e-6."""

SPREAD_IN_FLOAT64 = {"check_casts": "upstream encodes with no generator, and in float64 the least deviation of an encoding is not lost"}
"""What fails where the VAE is one `without_spread`."""


def ready(module: Any) -> Any:
    """Return the module in evaluation mode, without any parameter of one value only."""
    fill_constants(module)
    return module.eval()


def clip_text_encoder(*, layers: int = 3, positions: int = 77, projects: bool = False, **settings: Any) -> Any:
    """Return a CLIP text encoder for `clip_tokenizer`.

    Args:
        layers: Number of layers.
        positions: The longest prompt in tokens.
        projects: Whether it is the model with a projection, which returns `text_embeds`.
        settings: Further settings of `CLIPTextConfig`.
    """
    config = CLIPTextConfig(
        vocab_size=CLIP_VOCABULARY_SIZE,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=positions,
        projection_dim=TEXT_WIDTH,
        bos_token_id=CLIP_BOS,
        eos_token_id=CLIP_EOS,
        pad_token_id=CLIP_EOS,
        **settings,
    )
    return ready(CLIPTextModelWithProjection(config) if projects else CLIPTextModel(config))


def clip_vision_encoder(*, layers: int = 3, image_size: int = 32, patch_size: int = 8, projects: bool = False) -> Any:
    """Return a CLIP image encoder for `clip_image_processor`.

    Args:
        layers: Number of layers.
        image_size: Height and width in pixels.
        patch_size: Height and width in pixels of what becomes a token.
        projects: Whether it is the model with a projection, which returns `image_embeds`.
    """
    config = CLIPVisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=image_size,
        patch_size=patch_size,
    )
    return ready(CLIPVisionModelWithProjection(config) if projects else CLIPVisionModel(config))


def clip_image_processor(*, image_size: int = 32) -> Any:
    """Return the processor that makes pixels for `clip_vision_encoder`."""
    return CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size={"height": image_size, "width": image_size})


def siglip_vision_encoder(*, layers: int = 3, image_size: int = 32) -> Any:
    """Return a SigLIP image encoder for `siglip_image_processor`.

    Args:
        layers: Number of layers.
        image_size: Height and width in pixels.
    """
    config = SiglipVisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=image_size,
        patch_size=8,
    )
    return ready(SiglipVisionModel(config))


def siglip_image_processor(*, image_size: int = 32) -> Any:
    """Return the processor that makes pixels for `siglip_vision_encoder`."""
    return SiglipImageProcessor(size={"height": image_size, "width": image_size})


def t5_encoder(*, layers: int = 3, width: int = TEXT_WIDTH, vocabulary_size: int = T5_VOCABULARY_SIZE) -> Any:
    """Return a T5 encoder for `t5_tokenizer`; its embedding is tied to `shared`, as in every T5.

    Args:
        layers: Number of layers.
        width: Hidden size.
        vocabulary_size: Rows of the embedding, for another tokenizer.
    """
    return ready(T5EncoderModel(T5Config(**{**_t5_settings(layers), "d_model": width, "vocab_size": vocabulary_size})))


def umt5_encoder(*, layers: int = 3) -> Any:
    """Return a UMT5 encoder for `t5_tokenizer`."""
    return ready(UMT5EncoderModel(UMT5Config(**_t5_settings(layers))))


def autoencoder_kl(*, latent_channels: int = 4, widths: tuple[int, ...] = (16, 32), **settings: Any) -> Any:
    """Return an image autoencoder.

    Args:
        latent_channels: Channels of the latent.
        widths: Channels of each level; every level but the first halves height and width.
        settings: Further settings of `AutoencoderKL`.
    """
    levels = len(widths)
    return ready(
        AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=widths,
            layers_per_block=1,
            latent_channels=latent_channels,
            norm_num_groups=8,
            **settings,
        )
    )


def prior_transformer() -> Any:
    """Return an unCLIP prior, which makes of a text for `clip_text_encoder` what `clip_vision_encoder` makes of a picture."""
    return ready(
        PriorTransformer(
            num_attention_heads=2, attention_head_dim=16, embedding_dim=TEXT_WIDTH, num_layers=3, num_embeddings=77, additional_embeddings=4
        )
    )


def without_spread(autoencoder: Any) -> Any:
    """Return an autoencoder whose encodings are certain, for pipelines that draw from them with no generator of their caller's.

    Their deviation is the least that there is, and lost beside a mean that large; shift and scale of it give usual latents.
    """
    last = autoencoder.encoder.conv_out if autoencoder.quant_conv is None else autoencoder.quant_conv
    mean, log_variance = last.bias.chunk(2)
    with torch.no_grad():
        mean += _LARGE
        last.weight[mean.numel() :] = 0.0
        log_variance.fill_(-_LARGE)
    if "latents_mean" in autoencoder.config:
        autoencoder.register_to_config(latents_mean=[_LARGE] * mean.numel(), latents_std=[1.0] * mean.numel())
    else:
        autoencoder.register_to_config(shift_factor=_LARGE, scaling_factor=1.0)
    return autoencoder


def _t5_settings(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": T5_VOCABULARY_SIZE,
        "d_model": TEXT_WIDTH,
        "d_kv": 8,
        "d_ff": 2 * TEXT_WIDTH,
        "num_layers": layers,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    }
