"""Flux's siblings: encoders that run twice with true guidance, and ControlNets that alternate with the DiT."""

import pytest
import torch

from omni_offload import resolve_offload_plan
from omni_offload.config import make_config
from omni_offload.testing import sim
from omni_offload.testing.observe import device_size
from pipelines.flux import cases

CONTROLNETS = [cases.FLUX_CONTROLNET, cases.FLUX_MULTI_CONTROLNET]
SIBLINGS = [cases.FLUX_IMG2IMG, cases.FLUX_KONTEXT, *CONTROLNETS]
GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 2.0}


def by_name(case):
    return case.name


def run(case, pipeline, **changes):
    (image,) = case.outputs(pipeline(**{**case.make_inputs(pipeline), **changes}))
    return image.cpu()


def loads(backend):
    return {row.name: row.loads for row in backend.report().components}


@pytest.mark.parametrize("case", CONTROLNETS, ids=by_name)
def test_controlnet_and_transformer_are_loaded_once(case, device):
    """Both are on the device for the whole loop: one load each, however many steps, on a device that holds less than all weights."""
    expected = run(case, case.make_pipeline().to(device), num_inference_steps=3)
    pipeline = case.make_pipeline()
    everything = sum(device_size([module]) for module in pipeline.components.values() if isinstance(module, torch.nn.Module))
    there = []
    pipeline.transformer.register_forward_pre_hook(lambda *_: there.append(next(pipeline.controlnet.parameters()).data.device.type))
    sim.configure(capacity=sim.allocated() + everything - 1)
    try:
        with pipeline.enable_omni_offload(device=device) as backend:
            assert torch.equal(run(case, pipeline, num_inference_steps=3), expected)
            assert loads(backend) == {"text_encoder": 1, "text_encoder_2": 1, "controlnet": 1, "transformer": 1, "vae": 2}
            held = {row.name: row.bytes_in for row in backend.report().components}
    finally:
        sim.configure(capacity=0)
    assert len(there) == 3
    assert held["controlnet"] <= device_size([pipeline.controlnet])


@pytest.mark.parametrize("case", CONTROLNETS, ids=by_name)
def test_the_control_picture_matters(case):
    """The ControlNet's projections, which begin as zeros, are no zeros here: it changes the picture."""
    pipeline = case.make_pipeline()
    scale = case.make_inputs(pipeline)["controlnet_conditioning_scale"]
    none = [0.0] * len(scale) if isinstance(scale, list) else 0.0
    assert not torch.equal(run(case, pipeline), run(case, pipeline, controlnet_conditioning_scale=none))


def test_blocks_of_every_controlnet():
    """Each ControlNet's blocks are found, double ones first; one that stands twice in the list counts once."""
    pipeline = cases.FLUX_MULTI_CONTROLNET.make_pipeline()
    pipeline.controlnet.nets.append(pipeline.controlnet.nets[0])
    plan = resolve_offload_plan(pipeline, make_config({"mode": "layer"}))
    controlnet = next(component for component in plan.components if component.path == "controlnet")
    kinds = ("transformer_blocks", "single_transformer_blocks")
    assert controlnet.block_paths == tuple(f"controlnet.nets.{index}.{kind}" for index in (0, 1) for kind in kinds)


@pytest.mark.parametrize("case", SIBLINGS, ids=by_name)
def test_encoders_with_true_guidance(case, device):
    """Encoders that run for prompts and then for negative prompts are loaded once, together, which is less than the DiT takes."""
    pipeline = case.make_pipeline()
    expected = run(case, case.make_pipeline().to(device), **GUIDED)
    encoders = device_size([pipeline.text_encoder]) + device_size([pipeline.text_encoder_2])
    assert encoders < device_size([pipeline.transformer])
    with pipeline.enable_omni_offload(device=device) as backend:
        assert torch.equal(run(case, pipeline, **GUIDED), expected)
        found = loads(backend)
        bytes_in = sum(row.bytes_in for row in backend.report().components if row.name.startswith("text_encoder"))
    assert (found["text_encoder"], found["text_encoder_2"]) == (1, 1)
    assert bytes_in <= encoders


@pytest.mark.parametrize("case", SIBLINGS, ids=by_name)
def test_embeddings_given(case, device):
    """Where embeddings are given the encoders never run, and nothing of them is moved."""
    pipeline = case.make_pipeline()
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(prompt="a red cat", prompt_2=None, max_sequence_length=32)
    given = {"prompt": None, "negative_prompt": None, "prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "true_cfg_scale": 1.0}
    on_device = {**given, "prompt_embeds": embeds.to(device), "pooled_prompt_embeds": pooled.to(device)}
    expected = run(case, case.make_pipeline().to(device), **on_device)
    with pipeline.enable_omni_offload(device=device) as backend:
        assert torch.equal(run(case, pipeline, **on_device), expected)
        moved = {row.name: row.bytes_in for row in backend.report().components}
    assert (moved["text_encoder"], moved["text_encoder_2"]) == (0, 0)


@pytest.mark.parametrize("case", SIBLINGS, ids=by_name)
def test_what_users_ask_for(case, device):
    """Two images a prompt, a callback that changes the latents, and a VAE that decodes in tiles equal a resident run."""

    def halve(_pipeline, step, _time, tensors):
        return {"latents": tensors["latents"] / 2} if step == 0 else {}

    whole, pipeline = case.make_pipeline().to(device), case.make_pipeline()
    for one in (whole, pipeline):
        one.vae.enable_tiling()
        one.vae.tile_sample_min_size, one.vae.tile_latent_min_size = 16, 8
        one.vae.enable_slicing()
    changes = {"num_images_per_prompt": 2, "callback_on_step_end": halve}
    expected = run(case, whole, **changes)
    with pipeline.enable_omni_offload(device=device) as backend:
        assert torch.equal(run(case, pipeline, **changes), expected)
        uses_of_vae = loads(backend)["vae"]
    assert uses_of_vae <= 2
