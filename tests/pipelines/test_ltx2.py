"""LTX-2: two VAEs and a vocoder that take turns, statistics that the pipeline reads by itself, and a model that writes prompts."""

import pytest
import torch

from omni_offload.testing import sim
from omni_offload.testing.observe import device_size
from pipelines.ltx2.cases import LTX2
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.seeding import seeded
from pipelines.tiny.tokenizers import gemma_tokenizer

ORDER = ["text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder"]
NO_GUIDANCE = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
}


@pytest.fixture
def pipeline():
    return LTX2.make_pipeline()


@pytest.fixture(scope="module")
def resident(device):
    return run(LTX2.make_pipeline().to(device))


def run(pipeline, **changes):
    return [tensor.cpu() for tensor in LTX2.outputs(pipeline(**{**LTX2.make_inputs(pipeline), **changes}))]


def equal(one, other):
    return all(map(torch.equal, one, other))


def watch(pipeline):
    """Return a list that gets the name of a component, and what is on the device, whenever one runs."""
    seen = []
    parts = {**{name: getattr(pipeline, name) for name in ORDER}, "vae": pipeline.vae.decoder, "audio_vae": pipeline.audio_vae.decoder}

    def on_device():
        return {name for name in ORDER if any(p.device.type != "cpu" for p in getattr(pipeline, name).parameters())}

    for name, module in parts.items():
        module.register_forward_pre_hook(lambda *_, name=name: seen.append((name, on_device())))
    return seen


def test_components_take_turns(pipeline, resident, device):
    """With less room than for all weights: each is alone on the device when it runs, and is loaded once, the DiT for all its runs."""
    weights = [device_size([getattr(pipeline, name)]) for name in ORDER]
    seen = watch(pipeline)
    sim.configure(capacity=sim.allocated() + sum(weights) - 1)
    try:
        with pipeline.enable_omni_offload(device=device) as backend:
            assert equal(run(pipeline), resident)
            assert {row.name: row.loads for row in backend.report().components} == dict.fromkeys(ORDER, 1)
    finally:
        sim.configure(capacity=0)
    assert all(there == {name} for name, there in seen)
    assert list(dict.fromkeys(name for name, _ in seen)) == ORDER
    assert [name for name, _ in seen].count("transformer") == 6


@pytest.mark.parametrize("staying", [False, True])
def test_statistics_outside_of_uses(pipeline, device, staying):
    """The VAEs' statistics matter, and are right where the pipeline reads them: on the host, or on the device where they stay."""
    whole = LTX2.make_pipeline()
    generator = torch.Generator().manual_seed(1)
    latents = {"latents": torch.randn(1, 8, 2, 1, 2, generator=generator), "audio_latents": torch.randn(1, 2, 9, 4, generator=generator)}
    for one in (whole, pipeline):
        one.vae.latents_mean.add_(0.5)
        one.audio_vae.latents_std.mul_(2)
    expected = run(whole.to(device), output_type="latent", **latents)
    untouched = run(LTX2.make_pipeline().to(device), output_type="latent", **latents)
    assert not any(map(torch.equal, expected, untouched))
    with pipeline.enable_omni_offload(device=device, **({"components": ["dit"]} if staying else {})):
        found = run(pipeline, output_type="latent", **latents)
        assert {pipeline.vae.latents_mean.device.type, pipeline.audio_vae.latents_std.device.type} == {"sim" if staying else "cpu"}
    assert equal(found, expected)


def test_scheduler_of_the_sound(pipeline, resident, device):
    """The pipeline copies its scheduler for the sound while it is offloaded; a second call begins anew."""
    with pipeline.enable_omni_offload(device=device):
        for _ in range(2):
            assert equal(run(pipeline), resident)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ["a red cat", "two dogs"], "negative_prompt": ["blurry", "dark"]},
        {"num_videos_per_prompt": 2, **NO_GUIDANCE},
    ],
    ids=["two prompts", "two videos"],
)
def test_what_users_ask_for(pipeline, device, changes):
    """Batches and several videos a prompt equal a resident run; VAEs decode in tiles and slices as one piece of work."""
    whole = LTX2.make_pipeline().to(device)
    for one in (whole, pipeline):
        one.vae.enable_tiling()
        one.vae.enable_slicing()
    expected = run(whole, **changes)
    with pipeline.enable_omni_offload(device=device) as backend:
        assert equal(run(pipeline, **changes), expected)
        assert {row.loads for row in backend.report().components} == {1}


class Processor:
    """Stands for Gemma's processor, which needs torchvision: texts only."""

    def __init__(self):
        self.tokenizer = gemma_tokenizer()

    def __call__(self, *, text, images, return_tensors):
        return self.tokenizer(text, return_tensors=return_tensors)


@pytest.mark.parametrize("dedicated", [False, True])
def test_prompts_written_by_a_model(pipeline, device, dedicated):
    """`enhance_prompt` runs a model that it moves to the device by hand: offloaded that moves nothing, and the model is loaded once."""
    asked = {"prompt": "a red cat", "system_prompt": "more", "max_new_tokens": 3, "generation_kwargs": {"do_sample": False}}
    whole = LTX2.make_pipeline()
    for one in (whole, pipeline):
        one.processor = Processor()
        if dedicated:
            one.register_modules(prompt_enhancer=LTX2.make_pipeline().text_encoder)
    name = "prompt_enhancer" if dedicated else "text_encoder"
    with torch.no_grad():
        expected = whole.to(device).enhance_prompt(**asked)
        with pipeline.enable_omni_offload(device=device) as backend:
            assert pipeline.enhance_prompt(**asked) == expected
            rows = {row.name: row for row in backend.report().components}
            assert {row.name for row in rows.values() if row.loads} == {name}
            assert (rows[name].loads, rows[name].bytes_out) == (1, 0)
            assert {p.device.type for p in getattr(pipeline, name).parameters()} == {"cpu"}
    assert pipeline.enhance_prompt(**asked) == expected


def test_length_is_predicted(pipeline, device):
    """A model that predicts the length from the prompt takes its turn like any other."""
    from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

    whole = LTX2.make_pipeline()
    for one in (whole, pipeline):
        with seeded(0):
            head = LTX2DurationHead(video_cross_attention_dim=TEXT_WIDTH, audio_cross_attention_dim=TEXT_WIDTH, pooler_hidden_dim=16)
        one.register_modules(duration_head=ready(head))
    bounds = {"num_frames": None, "min_seconds": 0.3, "max_seconds": 0.4}
    expected = run(whole.to(device), **bounds)
    assert expected[0].shape[1] == 9
    with pipeline.enable_omni_offload(device=device) as backend:
        assert equal(run(pipeline, **bounds), expected)
        assert {row.name: row.loads for row in backend.report().components}["duration_head"] == 1
