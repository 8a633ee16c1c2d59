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
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5GemmaConfig,
    T5GemmaEncoderModel,
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
    qwen_tokenizer,
)

__all__ = [
    "gemma2_encoder",
    "gemma3_encoder",
    "glm_encoder",
    "llama_encoder",
    "llava_encoder",
    "mistral3_encoder",
    "qwen3_encoder",
    "qwen25_vl_encoder",
    "qwen25_vl_processor",
    "t5gemma_encoder",
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


def qwen25_vl_processor() -> Any:
    """Return the processor that makes tokens and patches for `qwen25_vl_encoder`: of each picture 56 x 56 pixels, four tokens.

    It is put together by hand, as its own constructor asks for a processor of videos, and that for torchvision. It cannot be saved.
    """
    area, tokenizer = 56 * 56, qwen_tokenizer()
    processor: Any = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": area, "longest_edge": area}, patch_size=14, merge_size=2)
    processor.tokenizer, processor.video_processor, processor.chat_template = tokenizer, None, tokenizer.chat_template
    for kind in ("image", "video"):
        token = f"<|{kind}_pad|>"
        setattr(processor, f"{kind}_token", token)
        setattr(processor, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
    return processor


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


def llava_encoder(*, layers: int = 3, picture_token: int) -> Any:
    """Return a Llava model for `llama_tokenizer`; it reads text, and pictures of 32 x 32 pixels as 16 tokens, and its head is not tied.

    Args:
        layers: Number of layers.
        picture_token: Id of the token that stands for a picture.
    """
    text = {
        "model_type": "llama",
        **_text_settings(layers, LLAMA_VOCABULARY_SIZE),
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "pad_token_id": LLAMA_EOS,
        "bos_token_id": LLAMA_BOS,
        "eos_token_id": LLAMA_EOS,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    special = {"image_token_index": picture_token, "pad_token_id": LLAMA_EOS}
    config = LlavaConfig(text_config=text, vision_config=vision, image_seq_length=16, **special)
    return ready(LlavaForConditionalGeneration(config))


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


def t5gemma_encoder(*, layers: int = 3) -> Any:
    """Return the encoder of a T5Gemma for `gemma_tokenizer`."""
    sizes = {"head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8, **_GEMMA_TOKENS}
    half = {**_text_settings(layers, GEMMA_VOCABULARY_SIZE), **sizes}
    config = T5GemmaConfig(encoder=half, decoder=half, is_encoder_decoder=False, vocab_size=GEMMA_VOCABULARY_SIZE)
    return ready(T5GemmaEncoderModel(config))


def _text_settings(layers: int, vocabulary_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary_size,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
