"""Stable Diffusion 3: three encoders that run twice are loaded once, one at a time."""

import inspect

import diffusers
import pytest
import torch

from omni_offload.testing import sim
from omni_offload.testing.observe import device_size
from pipelines.sd3.cases import SD3
from pipelines.sd3.pipeline_sd3 import OmniStableDiffusion3Pipeline

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
NEGATIVE = {"negative_prompt": "blurry", "max_sequence_length": 32}


@pytest.fixture
def pipeline():
    return SD3.make_pipeline()


def run(pipeline, **changes):
    (image,) = SD3.outputs(pipeline(**{**SD3.make_inputs(pipeline), **changes}))
    return image.cpu()


def encode(pipeline, **arguments):
    with torch.no_grad():
        return pipeline.encode_prompt(**{"prompt": "a red cat", "prompt_2": None, "prompt_3": None, **arguments})


def upstream(pipeline):
    plain = diffusers.StableDiffusion3Pipeline(**pipeline.components)
    plain.set_progress_bar_config(disable=True)
    return plain


class UpstreamOrder(OmniStableDiffusion3Pipeline):
    """As upstream: all encoders for the prompts, then all for the negative prompts."""

    def encode_prompt(self, *args, **kwargs):
        return diffusers.StableDiffusion3Pipeline.encode_prompt(self, *args, **kwargs)


class Together(UpstreamOrder):
    """In upstream's order, with all encoders on the device together."""

    _co_resident_modules = [ENCODERS]


def measure(cls, device, **budget):
    """Return the bytes that encoding copies to the device, in units of all encoders, and the device bytes held at most."""
    pipeline = SD3.make_pipeline()
    made = cls(**pipeline.components)
    made.set_progress_bar_config(disable=True)
    weights = sum(device_size([getattr(made, name)]) for name in ENCODERS)
    with made.enable_omni_offload(device=device, **budget) as backend:
        embeds = [tensor.cpu() for tensor in encode(made, **NEGATIVE)]
        report = backend.report()
        copied = sum(row.bytes_in for row in report.components if row.name in ENCODERS)
    return round(copied / weights, 1), report.peak_device_bytes, embeds


def test_bytes_moved_by_encoders(pipeline, device):
    """Each encoder is loaded once, alone; upstream's order loads each twice, unless all are there together: more at a time."""
    sizes = [device_size([getattr(pipeline, name)]) for name in ENCODERS]
    ours, our_peak, embeds = measure(OmniStableDiffusion3Pipeline, device)
    theirs, their_peak, expected = measure(UpstreamOrder, device)
    together, peak_together, _ = measure(Together, device)
    roomy, _, _ = measure(UpstreamOrder, device, device_memory=sum(sizes) + device_size([pipeline.transformer]))
    assert (ours, theirs, together, roomy) == (1.0, 2.0, 1.0, 1.0)
    assert our_peak <= max(sizes) < sum(sizes) * 0.9 < peak_together
    assert their_peak <= max(sizes)
    assert all(map(torch.equal, embeds, expected))


def test_a_device_that_holds_no_two_encoders(pipeline, device):
    """The least budget is that of the largest component, and each component is loaded once a call with it."""
    resident = run(SD3.make_pipeline().to(device))
    weights = [device_size([getattr(pipeline, name)]) for name in (*ENCODERS, "transformer", "vae")]
    room = max(weights) + 600_000
    assert room < sum(weights)
    sim.configure(capacity=sim.allocated() + room)
    try:
        with pipeline.enable_omni_offload(device=device, device_memory=max(weights)) as backend:
            assert torch.equal(run(pipeline), resident)
            assert {row.loads for row in backend.report().components} == {1}
    finally:
        sim.configure(capacity=0)


@pytest.mark.parametrize(
    "arguments",
    [
        NEGATIVE,
        {"max_sequence_length": 32},
        {**NEGATIVE, "clip_skip": 1, "num_images_per_prompt": 2},
        {**NEGATIVE, "prompt_2": "two", "prompt_3": "three", "negative_prompt_2": "not two", "negative_prompt_3": "not three"},
        {**NEGATIVE, "prompt": ["a red cat", "two dogs"]},
        {**NEGATIVE, "prompt": ["a red cat", "two dogs"], "negative_prompt": ["blurry", "dark"]},
        {**NEGATIVE, "negative_prompt": "a red cat"},
        {**NEGATIVE, "do_classifier_free_guidance": False},
        {**NEGATIVE, "prompt": None, "prompt_embeds": torch.ones(1, 109, 64), "pooled_prompt_embeds": torch.ones(1, 64)},
    ],
    ids="+".join,
)
def test_embeddings_are_upstream(pipeline, arguments):
    """Whatever is asked for, the embeddings are upstream's bit for bit, and nothing is left for the next call."""
    expected = encode(upstream(pipeline), **arguments)
    for _ in range(2):
        found = encode(pipeline, **arguments)
        for one, other in zip(found, expected, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


def test_without_t5(pipeline):
    """A pipeline without the third encoder encodes as upstream."""
    pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    assert all(map(torch.equal, encode(pipeline, **NEGATIVE), encode(upstream(pipeline), **NEGATIVE)))


@pytest.mark.parametrize("negative", [["one", "two"], ("blurry",)], ids=repr)
def test_upstream_refuses(pipeline, negative):
    """Negative prompts that do not match are refused by upstream, in its words."""
    arguments = {**NEGATIVE, "negative_prompt": negative}
    with pytest.raises((TypeError, ValueError)) as theirs:
        encode(upstream(pipeline), **arguments)
    with pytest.raises(theirs.type) as ours:
        encode(pipeline, **arguments)
    assert str(ours.value) == str(theirs.value)


def test_an_encoder_outside_of_encode_prompt(pipeline):
    """What upstream calls encoders through works by itself too."""
    with torch.no_grad():
        alone = pipeline._get_t5_prompt_embeds(prompt="a red cat", max_sequence_length=32)
        assert torch.equal(alone, upstream(pipeline)._get_t5_prompt_embeds(prompt="a red cat", max_sequence_length=32))


def test_signatures_are_upstream():
    """Overrides keep the upstream signature."""
    for name in ("encode_prompt", "_get_clip_prompt_embeds", "_get_t5_prompt_embeds"):
        ours = inspect.signature(getattr(OmniStableDiffusion3Pipeline, name))
        assert ours == inspect.signature(getattr(diffusers.StableDiffusion3Pipeline, name))
