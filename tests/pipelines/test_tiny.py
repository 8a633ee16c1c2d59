"""Tiny components are the same every time, and no two of their weights are alike."""

import logging

import pytest
import torch
from transformers import CLIPTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer, T5Tokenizer

from pipelines.tiny import components, inputs, language, logs, seeding, tokenizers, unets

BUILDERS = [
    components.autoencoder_kl,
    components.clip_text_encoder,
    components.clip_vision_encoder,
    lambda: components.clip_text_encoder(projects=True),
    lambda: components.clip_vision_encoder(projects=True),
    components.t5_encoder,
    components.umt5_encoder,
    language.gemma2_encoder,
    language.gemma3_encoder,
    language.glm_encoder,
    language.llama_encoder,
    lambda: language.llama_encoder(head=True),
    language.mistral3_encoder,
    language.qwen3_encoder,
    lambda: language.qwen3_encoder(head=True),
    language.qwen25_vl_encoder,
    unets.unet_2d,
    unets.control_net,
]


@pytest.mark.parametrize("builder", BUILDERS)
def test_same_weights_every_time(builder):
    """A seed decides every weight and buffer; another seed decides otherwise."""

    def build(seed):
        with seeding.seeded(seed):
            return builder().state_dict()

    first, again, other = build(0), build(0), build(1)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("builder", BUILDERS)
def test_no_weight_is_constant(builder):
    """Weights of one block differ from those of another, biases and gains too; components are in evaluation mode."""
    module = builder()
    assert not module.training
    assert all(p.min() != p.max() for p in module.parameters() if p.numel() > 1)
    assert len({p.flatten()[0].item() for p in module.parameters()}) == len(list(module.parameters()))


def test_seeding_leaves_the_generator_alone():
    """The global generator goes on as if nothing had been drawn, after an error too."""
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    first = torch.rand(1)
    with pytest.raises(ZeroDivisionError), seeding.seeded(0):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_generators_are_fresh():
    """Each generator starts anew."""
    assert torch.equal(torch.rand(2, generator=seeding.generator(3)), torch.rand(2, generator=seeding.generator(3)))


@pytest.mark.parametrize(
    ("make", "cls", "rows"),
    [
        (tokenizers.clip_tokenizer, CLIPTokenizer, tokenizers.CLIP_VOCABULARY_SIZE),
        (tokenizers.gemma_tokenizer, GemmaTokenizer, tokenizers.GEMMA_VOCABULARY_SIZE),
        (tokenizers.llama_tokenizer, LlamaTokenizer, tokenizers.LLAMA_VOCABULARY_SIZE),
        (tokenizers.qwen_tokenizer, Qwen2Tokenizer, tokenizers.QWEN_VOCABULARY_SIZE),
        (tokenizers.t5_tokenizer, T5Tokenizer, tokenizers.T5_VOCABULARY_SIZE),
    ],
)
def test_tokenizers(make, cls, rows, tmp_path):
    """Tokenizers tell texts apart, stay within the embedding, and survive being saved."""
    settings = {"padding": "max_length", "max_length": 16, "truncation": True}
    tokenizer = make(max_length=16)
    ids = tokenizer(["a red cat", "a red cap", "Ä €"], **settings).input_ids
    assert len({tuple(row) for row in ids}) == 3
    assert max(max(row) for row in ids) < rows
    assert tokenizer.model_max_length == 16
    tokenizer.save_pretrained(tmp_path)
    assert cls.from_pretrained(tmp_path)(["a red cat", "a red cap", "Ä €"], **settings).input_ids == ids


def test_clip_specials():
    """The ids that the text encoder's configuration names are the tokenizer's."""
    tokenizer = tokenizers.clip_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (tokenizers.CLIP_BOS, tokenizers.CLIP_EOS)
    assert len(tokenizer) == tokenizers.CLIP_VOCABULARY_SIZE


def test_picture():
    """The picture has the size that was asked for, and more than one colour."""
    picture = inputs.picture(width=24, height=16)
    assert picture.size == (24, 16)
    assert len(picture.getcolors(maxcolors=24 * 16)) > 100


def test_outputs_as_tensors():
    """One tensor or a list of them, in an output object or in a tuple; arrays and pictures are made tensors."""
    tensor = torch.ones(1)
    assert inputs.as_tensors((tensor,)) == [tensor]
    assert inputs.as_tensors({"frames": [tensor, tensor]}) == [tensor, tensor]
    assert inputs.as_tensors((tensor.numpy(),)) == [tensor]
    (found,) = inputs.as_tensors({"images": [inputs.picture(width=24, height=16)]})
    assert found.shape == (16, 24, 3)
    assert 0.9 < found.max() <= 1.0


@pytest.mark.parametrize("quant_conv", [True, False])
def test_an_encoding_without_spread(quant_conv):
    """Two draws from it are equal bit for bit, and depend on the picture."""
    with seeding.seeded(0):
        vae = components.without_spread(components.autoencoder_kl(use_quant_conv=quant_conv))
    with torch.no_grad():
        drawn = [vae.encode(torch.full((1, 3, 8, 8), value)).latent_dist.sample() for value in (0.5, 0.5, -0.5)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_only_a_known_message_is_kept_back(caplog):
    """A module whose class a case uses goes on to log all else, at every level; asked for twice it is one filter."""

    class Loud:
        """Stands in a module of its own."""

    Loud.__module__ = f"{__name__}.loud"
    logger = logging.getLogger(Loud.__module__)
    for _ in range(2):
        logs.keep_back(Loud, "on purpose")
    logger.warning("done on purpose: %s", 1)
    logger.warning("done by mistake")
    assert caplog.messages == ["done by mistake"]
    assert logger.level == logging.NOTSET
    assert len(logger.filters) == 1
