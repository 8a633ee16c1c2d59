"""Qwen-Image: positions that upstream caches for a device are nobody's weights, and a vision tower that never runs."""

import gc

import pipeline_runs
import pytest
import torch
from diffusers import QwenImagePipeline

from omni_offload.testing import sim
from pipelines.qwen_image.cases import QWEN_IMAGE
from pipelines.qwen_image.parts import forget_positions


@pytest.fixture(autouse=True)
def no_positions():
    """Upstream's cache of positions belongs to the process: what a resident run leaves there is device memory."""
    yield
    forget_positions()


@pytest.fixture
def pipeline():
    return QWEN_IMAGE.make_pipeline()


@pytest.fixture(scope="module")
def resident(device):
    return run(QWEN_IMAGE.make_pipeline().to(device))


def run(pipeline, **changes):
    return pipeline_runs.run(QWEN_IMAGE, pipeline, **changes)[0]


def test_a_device_that_holds_less_than_all_weights(pipeline, resident, device):
    """With less room than for all weights, two calls equal a resident run, and each component is loaded once a call."""
    pipeline_runs.require_right_with_less_than_all(QWEN_IMAGE, pipeline, [resident], device)


def test_positions_are_moved_with_the_transformer(pipeline, resident, device):
    """The complex frequencies, plain tensors, are on the device within a use and the same objects on the host after it."""
    rope, seen = pipeline.transformer.pos_embed, []
    found = rope.pos_freqs, rope.neg_freqs
    rope.register_forward_pre_hook(lambda module, *_: seen.append((module.pos_freqs.device.type, module.neg_freqs.device.type)))
    before = sim.allocated()
    with pipeline.enable_omni_offload(device=device):
        assert torch.equal(run(pipeline), resident)
        assert rope.pos_freqs is found[0]
        assert rope.neg_freqs is found[1]
        assert rope.pos_freqs.device.type == "cpu"
        assert rope.pos_freqs.dtype is torch.complex64
    assert set(seen) == {("sim", "sim")}
    assert sim.allocated() - before <= 1024  # the scheduler's own


def test_resident_after_offload(pipeline, resident, device):
    """After disable the pipeline runs resident, also through another pipeline: no cache hands out tensors of the host."""
    with pipeline.enable_omni_offload(device=device):
        run(pipeline)
    plain = QwenImagePipeline(**pipeline.components).to(device)
    plain.set_progress_bar_config(disable=True)
    assert torch.equal(run(plain), resident)
    assert torch.equal(run(pipeline), resident)


def test_resident_after_a_direct_use(pipeline, resident, device):
    """A use of the DiT outside of any call leaves nothing in the cache that the pipeline's next call would meet."""
    given = []
    pipeline.transformer.register_forward_pre_hook(lambda _module, _args, kwargs: given.append(kwargs), with_kwargs=True)
    with pipeline.enable_omni_offload(device=device):
        run(pipeline)
        with torch.no_grad():
            pipeline.transformer(**given[0])
    pipeline.to(device)
    assert torch.equal(run(pipeline), resident)


def test_nothing_is_left_after_an_error(pipeline, resident, device):
    """An error in the middle of decoding leaves no frame and no position on the device; the next call is right."""

    class BoomError(Exception): ...

    def fail(*_):
        raise BoomError

    before = sim.allocated()
    with pipeline.enable_omni_offload(device=device):
        handle = pipeline.vae.decoder.up_blocks[-1].register_forward_pre_hook(fail)
        with pytest.raises(BoomError):
            run(pipeline)
        handle.remove()
        gc.collect()
        assert sim.allocated() - before <= 1024
        assert torch.equal(run(pipeline), resident)


def test_vision_tower_never_runs(pipeline, device):
    """Prompts are texts: the vision tower is there, and is not entered; the head is."""
    entered = []
    pipeline.text_encoder.model.visual.register_forward_pre_hook(lambda *_: entered.append("visual"))
    pipeline.text_encoder.lm_head.register_forward_pre_hook(lambda *_: entered.append("lm_head"))
    with pipeline.enable_omni_offload(device=device):
        run(pipeline)
    assert set(entered) == {"lm_head"}


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ["a red cat", "two dogs"], "negative_prompt": ["blurry", "dark"]},
        {"num_images_per_prompt": 2, "true_cfg_scale": 1.0, "negative_prompt": None},
        {"output_type": "latent"},
    ],
    ids="+".join,
)
def test_what_users_ask_for(pipeline, device, changes):
    """Batches, several images a prompt, and latents equal a resident run; the VAE decodes in tiles as one piece of work."""
    whole = QWEN_IMAGE.make_pipeline().to(device)
    for one in (whole, pipeline):
        one.vae.enable_tiling(16, 16, 12, 12)
    expected = run(whole, **changes)
    with pipeline.enable_omni_offload(device=device) as backend:
        assert torch.equal(run(pipeline, **changes), expected)
        assert {row.name: row.loads for row in backend.report().components}["vae"] == ("output_type" not in changes)
