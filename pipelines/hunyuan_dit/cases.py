"""HunyuanDiT cases: random weights, a few hundred thousand parameters."""

import functools
import string
from collections.abc import Callable
from typing import Any

import attrs
from diffusers import DDPMScheduler, HunyuanDiT2DControlNetModel, HunyuanDiT2DModel
from transformers import BertConfig, BertModel, BertTokenizer

from omni_offload.testing import PipelineCase
from pipelines.hunyuan_dit.pipeline_hunyuan_dit import (
    OmniHunyuanDiTControlNetPipeline,
    OmniHunyuanDiTPAGPipeline,
    OmniHunyuanDiTPipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import SPREAD_IN_FLOAT64, TEXT_WIDTH, autoencoder_kl, ready, t5_encoder, without_spread
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["HUNYUAN_DIT", "HUNYUAN_DIT_CONTROLNET", "HUNYUAN_DIT_PAG"]

_BERT_TOKENS = 77
_T5_TOKENS = 256  # as many as the pipeline asks for

_BLOCKS: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "in_channels": 4,
    "cross_attention_dim": TEXT_WIDTH,
    "cross_attention_dim_t5": TEXT_WIDTH,
    "pooled_projection_dim": 16,
    "mlp_ratio": 2.0,
    "text_len": _BERT_TOKENS,
    "text_len_t5": _T5_TOKENS,
    "activation_fn": "gelu-approximate",
}
_LAYERS = 6


def _tokenizer() -> Any:
    """Return a BERT tokenizer with one token a letter that begins a word, and one a letter within."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for letter in string.ascii_lowercase:
        tokens += [letter, f"##{letter}"]
    return BertTokenizer(vocab={token: index for index, token in enumerate(tokens)}, model_max_length=_BERT_TOKENS)


def _text_encoder() -> Any:
    config = BertConfig(
        vocab_size=64,
        hidden_size=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * TEXT_WIDTH,
        max_position_embeddings=_BERT_TOKENS,
    )
    return ready(BertModel(config))


def _transformer() -> Any:
    return ready(HunyuanDiT2DModel(**_BLOCKS, num_layers=_LAYERS))


def _controlnet() -> Any:
    """Return a ControlNet of half as many blocks, less one; `ready` fills its projections, which begin as zeros, with noise."""
    return ready(HunyuanDiT2DControlNetModel(**_BLOCKS, transformer_num_layers=_LAYERS))


def _vae() -> Any:
    return autoencoder_kl(widths=(8, 8, 8, 8))  # the pipeline counts on a factor of eight


def _sure_vae() -> Any:
    """Return a VAE for a pipeline that encodes a control picture with torch's own generator, which gives others in every call."""
    return without_spread(_vae())


def _pipeline(cls: type, parts: dict[str, Callable[[], Any]]) -> Any:
    return cls(
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(),
        transformer=_transformer(),
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=t5_encoder(layers=2),
        tokenizer_2=t5_tokenizer(max_length=_T5_TOKENS),
        **{name: make() for name, make in {"vae": _vae, **parts}.items()},
    )


_inputs = functools.partial(prompted_inputs, negative_prompt="blurry", use_resolution_binning=False)


def _case(name: str, cls: type, seed: int, arguments: dict[str, Any], **parts: Callable[[], Any]) -> PipelineCase:
    make_pipeline = functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, parts))
    return PipelineCase(name=name, make_pipeline=make_pipeline, make_inputs=_inputs(**arguments), outputs=as_tensors)


HUNYUAN_DIT = _case("hunyuan_dit", OmniHunyuanDiTPipeline, 48, {})
"""Text to image with guidance: six blocks, of which the last two take what the first two hand on."""

HUNYUAN_DIT_PAG = _case("hunyuan_dit_pag", OmniHunyuanDiTPAGPipeline, 49, {"pag_scale": 2.0})
"""Text to image with both kinds of guidance."""

HUNYUAN_DIT_CONTROLNET = attrs.evolve(
    _case(
        "hunyuan_dit_controlnet",
        OmniHunyuanDiTControlNetPipeline,
        50,
        {"control_image": picture(), "controlnet_conditioning_scale": 0.7},
        vae=_sure_vae,
        controlnet=_controlnet,
    ),
    expected_failures=SPREAD_IN_FLOAT64,
)
"""Control picture and text to image."""
