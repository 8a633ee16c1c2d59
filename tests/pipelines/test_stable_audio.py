"""Stable Audio: weights that are computed in every use, and a projection that runs three times."""

import copy

import pipeline_runs
import pytest
import torch

from omni_offload.testing import sim
from omni_offload.testing.observe import device_size
from pipelines.stable_audio.cases import STABLE_AUDIO

COMPONENTS = ("text_encoder", "projection_model", "transformer", "vae")


@pytest.fixture
def pipeline():
    return STABLE_AUDIO.make_pipeline()


@pytest.fixture(scope="module")
def resident(device):
    return run(STABLE_AUDIO.make_pipeline().to(device))


def run(pipeline, **changes):
    return pipeline_runs.run(STABLE_AUDIO, pipeline, **changes)[0]


def normalised(vae):
    return [module for module in vae.modules() if "weight_g" in module._parameters]


def test_a_device_that_holds_less_than_all_weights(pipeline, resident, device):
    """With less room than for all weights, two calls equal a resident run; each component is loaded once a call."""
    pipeline_runs.require_right_with_less_than_all(STABLE_AUDIO, pipeline, [resident], device)


def test_computed_weights(pipeline, resident, device):
    """Normalised weights are computed on the device in every use; afterwards they are on the host, and nothing is left behind."""
    layers, seen = normalised(pipeline.vae), []
    before = sim.allocated()
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: seen.append(module.weight.device.type))
    with pipeline.enable_omni_offload(device=device):
        for _ in range(2):
            assert torch.equal(run(pipeline), resident)
            assert {layer.weight.device.type for layer in layers} == {"cpu"}
            assert sim.allocated() - before <= 1536  # the scheduler's own
    assert set(seen) == {"sim"}
    assert len(seen) == 2 * len(normalised(pipeline.vae.decoder))


def test_bytes_moved(pipeline, device):
    """Loading the VAE copies its parameters, once, and not what is computed from them; nothing comes back."""
    parameters = device_size([pipeline.vae])
    computed = sum(layer.weight.nbytes for layer in normalised(pipeline.vae))
    with pipeline.enable_omni_offload(device=device) as backend:
        for _ in range(3):
            run(pipeline)
        row = {row.name: row for row in backend.report().components}["vae"]
    assert row.bytes_in <= 3 * parameters < row.bytes_in + 3 * computed
    assert row.bytes_out == 0


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")  # upstream uses the older kind
def test_loaded_without_initialisation(pipeline, resident, device, tmp_path):
    """Loaded from a folder the computed weights are on the meta device, as upstream leaves them; that is no obstacle."""
    import pipelines

    pipeline.save_pretrained(tmp_path)
    loaded = pipelines.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    for module in loaded.components.values():
        if isinstance(module, torch.nn.Module):
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()  # mapped files are not aligned
    assert {layer.weight.device.type for layer in normalised(loaded.vae)} == {"meta"}
    with loaded.enable_omni_offload(device=device):
        assert torch.equal(run(loaded), resident)


def test_a_sound_to_begin_with(pipeline, device):
    """An initial sound on the host is encoded on the device, and the VAE can be copied between calls."""
    wave = torch.sin(torch.arange(128.0) / 3).repeat(1, 2, 1)
    arguments = {"initial_audio_waveforms": wave, "initial_audio_sampling_rate": 40}
    whole = STABLE_AUDIO.make_pipeline().to(device)
    expected = run(whole, **{**arguments, "initial_audio_waveforms": wave.to(device)})
    with pipeline.enable_omni_offload(device=device):
        assert torch.equal(run(pipeline, **arguments), expected)
        twin = copy.deepcopy(pipeline.vae)
    assert {layer.weight.device.type for layer in normalised(twin)} == {"cpu"}


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ["a red cat", "two dogs"], "negative_prompt": ["noise", "hum"]},
        {"num_waveforms_per_prompt": 2, "negative_prompt": None},
        {"output_type": "latent", "guidance_scale": 1.0},
    ],
    ids="+".join,
)
def test_what_users_ask_for(pipeline, device, changes):
    """Batches, several sounds a prompt, latents, and a VAE in slices equal a resident run."""
    whole = STABLE_AUDIO.make_pipeline().to(device)
    for one in (whole, pipeline):
        one.vae.enable_slicing()
    expected = run(whole, **changes)
    with pipeline.enable_omni_offload(device=device):
        assert torch.equal(run(pipeline, **changes), expected)
