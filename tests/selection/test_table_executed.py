"""Who goes where, carried out on the software accelerator: where each component is during a call, between calls and afterwards."""

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.errors import ComponentPathError

SHOWN = ("text_encoder", "mllm", "my_text_encoder", "plain", "transformer", "vae", "norm")
"""An encoder by the start of its name, by what the plan says, by the end of its name, and of no kind; a DiT, a VAE, a resident."""

KINDS = {"text_encoder": ("text_encoder", "mllm", "my_text_encoder"), "dit": ("transformer",), "vae": ("vae",)}

SELECTIONS = [None, ["dit"], ["text_encoder"], ["vae"], ["dit", "vae"], ["text_encoder", "dit"], ["dit", "text_encoder", "vae"]]


class Part(nn.Module):
    """A component that notes what is on the device when it runs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(1))
        self.requires_grad_(requires_grad=False)

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.scale


class Table(OmniOffloadMixin):
    """One component of every kind, one that is None and one without parameters."""

    _dit_modules = ["transformer", "gone"]
    _encoder_modules = ["text_encoder", "mllm", "my_text_encoder", "plain"]
    _vae_modules = ["vae", "empty"]
    _resident_modules = ["norm"]
    _offload_plan = OffloadPlan(encoder_component_types={"mllm": "text_encoder"})

    def __init__(self):
        torch.manual_seed(0)
        for name in SHOWN:
            setattr(self, name, Part())
        self.gone, self.empty = None, nn.Identity()
        self.seen = []

    def __call__(self, x):
        for name in SHOWN:
            x = getattr(self, name)(x)
            self.seen.append((name, _on_device(self)))
        return self.empty(x)


def _on_device(pipeline):
    return {name for name in SHOWN if any(t.device.type == "sim" for t in getattr(pipeline, name).state_dict().values())}


@pytest.fixture(autouse=True)
def leaves_nothing(nothing_left):
    """Every test here ends with an empty device, no pinned byte and no race."""


@pytest.mark.parametrize("components", SELECTIONS, ids=str)
def test_every_cell_of_model_level(components):
    """What is selected is on the device only while it runs; what is not, and what is resident, always while enabled."""
    wanted = Table()(torch.ones(1, 8))
    pipeline = Table()
    selected = set(SHOWN) - {"norm"} if components is None else {name for kind in components for name in KINDS[kind]}
    staying = set(SHOWN) - selected
    backend = pipeline.enable_omni_offload(device="sim", components=components)
    for _ in range(2):
        assert _on_device(pipeline) == staying
        pipeline.seen.clear()
        assert torch.equal(pipeline(torch.ones(1, 8)).cpu(), wanted)
        assert [name for name, _ in pipeline.seen] == list(SHOWN)
        for name, there in pipeline.seen:
            assert there - staying <= {name}, name
    assert {entry.name: entry.treatment for entry in backend.report().components} == {
        name: "rotate" if name in selected else "stay" for name in SHOWN
    }
    backend.disable()
    assert _on_device(pipeline) == set()
    assert torch.equal(pipeline(torch.ones(1, 8)), wanted)


def test_a_component_that_runs_is_on_the_device():
    """Within its forward a component that rotates is there, alone but for what stays."""
    pipeline = Table()
    inside = {}
    for name in SHOWN:
        getattr(pipeline, name).register_forward_pre_hook(lambda *_, name=name: inside.setdefault(name, _on_device(pipeline)) and None)
    with pipeline.enable_omni_offload(device="sim"):
        pipeline(torch.ones(1, 8))
    assert inside == {name: {name, "norm"} for name in SHOWN}


@pytest.mark.parametrize("components", SELECTIONS, ids=str)
def test_an_undeclared_component_is_refused_before_anything_moves(components):
    """A component with parameters that stands in no list is named; one without parameters, or None, takes part without effect."""
    pipeline = Table()
    pipeline.upsampler, pipeline.processor, pipeline.nothing = Part(), nn.Identity(), None
    with pytest.raises(ComponentPathError, match=r"'upsampler' \(Part\) holds parameters and stands in no list; add it to one of"):
        pipeline.enable_omni_offload(device="sim", components=components)
    assert _on_device(pipeline) == set()
    assert pipeline.offload_backend is None
    del pipeline.upsampler
    with pipeline.enable_omni_offload(device="sim", components=components):
        assert pipeline(torch.ones(1, 8)).device.type == "sim"
