"""Tiny language models that serve as text encoders, some of them whole: with a vision tower, or a head."""

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.tokenizers import (
    GEMMA_BOS,
    GEMMA_EOS,
    GEMMA_PAD,
    GEMMA_VOCABULARY_SIZE,
    LLAMA_BOS,
    LLAMA_EOS,
    LLAMA_VOCABULARY_SIZE,
    QWEN_PAD,
    QWEN_SPECIALS,
    QWEN_VOCABULARY_SIZE,
)

__all__ = [
    "gemma2_encoder",
    "gemma3_encoder",
    "glm_encoder",
    "llama_encoder",
    "mistral3_encoder",
    "qwen3_encoder",
    "qwen25_vl_encoder",
]

_GEMMA_TOKENS = {"pad_token_id": GEMMA_PAD, "eos_token_id": GEMMA_EOS, "bos_token_id": GEMMA_BOS}
_QWEN_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), QWEN_PAD)


def qwen25_vl_encoder(*, layers: int = 3) -> Any:
    """Return a Qwen2.5-VL model for `qwen_tokenizer`; it reads text and pictures, and its head is not tied."""
    text = {
        **_text_settings(layers, QWEN_VOCABULARY_SIZE),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "max_position_embeddings": 4096,
        **_QWEN_TOKENS,
    }
    vision = {
        "depth": 2,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    specials = {
        name: QWEN_PAD + QWEN_SPECIALS.index(token)
        for name, token in {
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
        }.items()
    }
    return ready(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **specials)))


def gemma3_encoder(*, layers: int = 3) -> Any:
    """Return a Gemma 3 model for `gemma_tokenizer`; it reads text and pictures, and its head is tied to its embedding."""
    text = {
        **_text_settings(layers, GEMMA_VOCABULARY_SIZE),
        "head_dim": 8,
        "sliding_window": 64,
        "query_pre_attn_scalar": 8,
        "max_position_embeddings": 1024,
        **_GEMMA_TOKENS,
    }
    vision = {
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    last = GEMMA_VOCABULARY_SIZE - 1
    specials = {"image_token_index": last, "eoi_token_index": last - 1, "boi_token_index": last - 2}
    return ready(Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **specials)))


def gemma2_encoder(*, layers: int = 3) -> Any:
    """Return a Gemma 2 model for `gemma_tokenizer`, without a head."""
    settings = {"head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8, **_GEMMA_TOKENS}
    return ready(Gemma2Model(Gemma2Config(**_text_settings(layers, GEMMA_VOCABULARY_SIZE), **settings)))


def glm_encoder(*, layers: int = 3) -> Any:
    """Return a GLM model for `qwen_tokenizer`, without a head."""
    tokens = {"pad_token_id": QWEN_PAD, "eos_token_id": QWEN_PAD}
    return ready(GlmModel(GlmConfig(**_text_settings(layers, QWEN_VOCABULARY_SIZE), head_dim=8, **tokens)))


def llama_encoder(*, layers: int = 3, head: bool = False) -> Any:
    """Return a Llama model for `llama_tokenizer`.

    Args:
        layers: Number of layers.
        head: Whether it is the model that predicts tokens, whose head is not tied.
    """
    tokens = {"pad_token_id": LLAMA_EOS, "bos_token_id": LLAMA_BOS, "eos_token_id": LLAMA_EOS}
    config = LlamaConfig(**_text_settings(layers, LLAMA_VOCABULARY_SIZE), head_dim=8, max_position_embeddings=1024, **tokens)
    return ready(LlamaForCausalLM(config) if head else LlamaModel(config))


def mistral3_encoder(*, layers: int = 3) -> Any:
    """Return a Mistral 3 model for `qwen_tokenizer`; it reads text and pictures."""
    vision = {
        "model_type": "pixtral",
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
    }
    text = {"model_type": "mistral", **_text_settings(layers, QWEN_VOCABULARY_SIZE), "head_dim": 8, **_QWEN_TOKENS}
    specials = {"image_token_index": QWEN_PAD + QWEN_SPECIALS.index("<|image_pad|>"), "spatial_merge_size": 2}
    return ready(Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, **specials)))


def qwen3_encoder(*, layers: int = 3, head: bool = False) -> Any:
    """Return a Qwen3 model for `qwen_tokenizer`.

    Args:
        layers: Number of layers.
        head: Whether it is the model that predicts tokens, whose head is tied to its embedding.
    """
    settings = {**_text_settings(layers, QWEN_VOCABULARY_SIZE), "head_dim": 8, "tie_word_embeddings": True, **_QWEN_TOKENS}
    config = Qwen3Config(**settings)
    return ready(Qwen3ForCausalLM(config) if head else Qwen3Model(config))


def _text_settings(layers: int, vocabulary_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary_size,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
