"""Tokenizers whose vocabulary is computed in memory; they save and load like any other."""

import string
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, T5Tokenizer

__all__ = [
    "CLIP_BOS",
    "CLIP_EOS",
    "CLIP_VOCABULARY_SIZE",
    "T5_VOCABULARY_SIZE",
    "clip_tokenizer",
    "t5_tokenizer",
]

CLIP_BOS = 512
CLIP_EOS = 513
"""Id of the end token; a text encoder must carry it too, as its pooled output is taken there."""

CLIP_VOCABULARY_SIZE = 514
T5_VOCABULARY_SIZE = 96
"""Rows of the embedding: the vocabulary, rounded up to a multiple of 32."""

_SPACE = "\u2581"


def clip_tokenizer(*, max_length: int = 77) -> Any:
    """Return a CLIP tokenizer with one token a byte, and one for each byte that ends a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length)


def t5_tokenizer(*, max_length: int = 64) -> Any:
    """Return a T5 tokenizer with one token a printable ASCII character."""
    letters = string.ascii_letters + string.digits + ".,!?'\"-:;()<>|_/#@&\n"
    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        (_SPACE, -2.0),
        *((letter, -3.0) for letter in letters),
    ]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, additional_special_tokens=[], model_max_length=max_length)
