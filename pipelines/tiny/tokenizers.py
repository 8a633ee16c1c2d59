"""Tokenizers whose vocabulary is computed in memory; they save and load like any other."""

import string
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer, RobertaTokenizer, T5Tokenizer

__all__ = [
    "CLIP_BOS",
    "CLIP_EOS",
    "CLIP_VOCABULARY_SIZE",
    "GEMMA_BOS",
    "GEMMA_EOS",
    "GEMMA_PAD",
    "GEMMA_VOCABULARY_SIZE",
    "LLAMA_BOS",
    "LLAMA_EOS",
    "LLAMA_VOCABULARY_SIZE",
    "QWEN_PAD",
    "QWEN_SPECIALS",
    "QWEN_VOCABULARY_SIZE",
    "T5_VOCABULARY_SIZE",
    "clip_tokenizer",
    "gemma_tokenizer",
    "llama_tokenizer",
    "qwen_tokenizer",
    "roberta_tokenizer",
    "t5_tokenizer",
]

CLIP_BOS = 512
CLIP_EOS = 513
"""Id of the end token; a text encoder must carry it too, as its pooled output is taken there."""

CLIP_VOCABULARY_SIZE = 514
T5_VOCABULARY_SIZE = 96
"""Rows of the embedding: the vocabulary, rounded up to a multiple of 32."""

QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_PAD = 256
"""Id of `<|endoftext|>`; the other specials follow in order."""

QWEN_VOCABULARY_SIZE = QWEN_PAD + len(QWEN_SPECIALS)

GEMMA_PAD, GEMMA_EOS, GEMMA_BOS = range(3)
GEMMA_VOCABULARY_SIZE = 352
"""Rows of the embedding: the vocabulary, with room at the end for the specials of a model that sees pictures."""

LLAMA_BOS, LLAMA_EOS = 1, 2
LLAMA_VOCABULARY_SIZE = 352
"""Rows of the embedding: the vocabulary, rounded up to a multiple of 32."""

_SPACE = "\u2581"
_LETTERS = string.ascii_letters + string.digits + ".,!?'\"-:;()<>|_/#@&\n"

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part.get('text', '<|image_pad|>') }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def clip_tokenizer(*, max_length: int = 77) -> Any:
    """Return a CLIP tokenizer with one token a byte, and one for each byte that ends a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length)


def t5_tokenizer(*, max_length: int = 64) -> Any:
    """Return a T5 tokenizer with one token a printable ASCII character."""
    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        (_SPACE, -2.0),
        *((letter, -3.0) for letter in _LETTERS),
    ]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, additional_special_tokens=[], model_max_length=max_length)


def qwen_tokenizer(*, max_length: int = 4096) -> Any:
    """Return a Qwen2 tokenizer with one token a byte, and a chat template."""
    tokens = [*sorted(ByteLevel.alphabet()), *QWEN_SPECIALS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=max_length, additional_special_tokens=list(QWEN_SPECIALS[1:]))
    tokenizer.chat_template = _CHAT
    return tokenizer


def roberta_tokenizer(*, max_length: int = 77) -> Any:
    """Return a RoBERTa tokenizer with one token a byte."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return RobertaTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length)


def gemma_tokenizer(*, max_length: int = 512) -> Any:
    """Return a Gemma tokenizer with one token a letter, and one a byte for what is no letter; it pads on the left."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE, *_LETTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length, padding_side="left")
    tokenizer.chat_template = _CHAT
    return tokenizer


def llama_tokenizer(*, max_length: int = 512) -> Any:
    """Return a Llama tokenizer with one token a letter, and one a byte for what is no letter; it pads with its end token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE, *_LETTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length, pad_token=tokens[LLAMA_EOS], padding_side="right")
    tokenizer.chat_template = _CHAT
    return tokenizer
