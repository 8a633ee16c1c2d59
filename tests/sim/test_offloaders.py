"""The offloaders of diffusers run unchanged on the device; the checker passes them, and catches a wait taken out."""

import diffusers
import pytest
import torch

from omni_offload.testing import sim
from pipelines.flux.cases import FLUX


def make_pipeline():
    """Return diffusers' own Flux pipeline over tiny components, equal each time."""
    pipe = diffusers.FluxPipeline(**FLUX.make_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe):
    return pipe(
        "a red cat",
        num_inference_steps=2,
        height=32,
        width=32,
        max_sequence_length=32,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images.cpu()


@pytest.fixture(scope="module")
def expected():
    return generate(make_pipeline())


OFFLOADERS = {
    "resident": lambda pipe: pipe.to("sim"),
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="sim"),
    "model, device found": lambda pipe: pipe.enable_model_cpu_offload(),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="sim"),
    "blocks": lambda pipe: group(pipe, "block_level", num_blocks_per_group=1),
    "blocks, stream": lambda pipe: group(pipe, "block_level", num_blocks_per_group=1, use_stream=True),
    "leaves, stream": lambda pipe: group(pipe, "leaf_level", use_stream=True),
    "leaves, stream, recorded": lambda pipe: group(pipe, "leaf_level", use_stream=True, record_stream=True),
}


def group(pipe, kind, **options):
    pipe.enable_group_offload(onload_device=torch.device("sim"), offload_device=torch.device("cpu"), offload_type=kind, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OFFLOADERS)
def test_offloader_of_diffusers(device, expected, name):
    """An offloader gives the bits of the CPU, without a race."""
    pipe = make_pipeline()
    sim.reset_counters()
    OFFLOADERS[name](pipe)
    made = generate(pipe)
    assert torch.equal(made, expected)
    assert sim.h2d_bytes() > 0
    assert sim.races() == []
    if "stream" in name:
        assert sim.pinned_bytes() > 0


@pytest.mark.filterwarnings("ignore")
def test_wait_taken_out_of_an_offloader_is_found(device, expected, monkeypatch):
    """The output stays equal, so that no comparison of outputs would find it."""
    pipe = make_pipeline()
    OFFLOADERS["blocks, stream"](pipe)
    monkeypatch.setattr(torch.sim, "current_stream", lambda _device=None: Unwaited())
    made = generate(pipe)
    assert torch.equal(made, expected)
    assert {race.kind for race in sim.races()} >= {"reuse-after-free"}


class Unwaited:
    """A stream that does not wait."""

    def synchronize(self):
        pass
