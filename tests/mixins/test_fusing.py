"""Adapters are fused on the device, and what was written there through `.data` is kept."""

import gc

import pytest
import torch
from torch import nn

from omni_offload import ModuleResidency, OmniOffloadMixin
from omni_offload.testing import sim


class Upstream:
    """Fuses as diffusers does: through `.data`, for components given by name."""

    def __init__(self):
        torch.manual_seed(0)
        self.transformer, self.text_encoder = nn.Linear(8, 8).requires_grad_(False), None
        self.seen = []

    def fuse_lora(self, components=("transformer", "text_encoder"), lora_scale=1.0):
        for name in components:
            part = getattr(self, name)
            self.seen.append((name, lora_scale, None if part is None else part.weight.device.type))
            if part is not None:
                part.weight.data += lora_scale

    def __call__(self, x):
        return self.transformer(x.to(self.transformer.weight.device) if self.offload_backend is None else x)


class Inheriting(OmniOffloadMixin, Upstream):
    _dit_modules = ["transformer"]
    _encoder_modules = ["text_encoder"]


class ByHand(OmniOffloadMixin, Upstream):
    """Wrote its own pair; `stays` leaves the weights on the device."""

    _dit_modules = ["transformer"]
    stays = False

    def enable_omni_model_cpu_offload(self, *, device, pin_memory, use_hsdp, offload_components=None):
        self.residency = ModuleResidency(self.transformer, device, pin_memory=pin_memory)
        self.residency.prepare()
        if self.stays:
            self.residency.load()

    def disable_omni_model_cpu_offload(self):
        self.residency.restore()


class Staying(ByHand):
    stays = True


@pytest.mark.parametrize("cls", [Inheriting, ByHand, Staying])
def test_fusing_happens_on_the_device_and_is_kept(cls, device):
    """While offload is enabled every component is on the device when it is fused, one at a time, and the weights are fused afterwards."""
    pipe = cls()
    expected = pipe.transformer.weight + 0.5
    pipe.enable_omni_offload(device=device)
    pipe.fuse_lora(lora_scale=0.5)
    assert pipe.seen == [("transformer", 0.5, device.type), ("text_encoder", 0.5, None)]
    assert torch.equal(pipe.transformer.weight.cpu(), expected)
    assert pipe.transformer.weight.device.type == (device.type if cls is Staying else "cpu")
    pipe.disable_omni_offload()
    assert torch.equal(pipe.transformer.weight, expected)
    del pipe
    gc.collect()
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


def test_fusing_without_offload_is_the_pipelines_own(device):
    """Without offload, or for no component, nothing is moved."""
    pipe = Inheriting()
    pipe.fuse_lora(["transformer"])
    with pipe.enable_omni_offload(device=device) as backend:
        pipe.fuse_lora(components=[])
        assert backend.report().components[0].loads == 0
    assert pipe.seen == [("transformer", 1.0, "cpu")]


@pytest.mark.parametrize("cls", [Inheriting, ByHand])
def test_a_failure_while_fusing_leaves_the_device(cls, device):
    """An error passes, the component leaves the device, and what was written before it is kept."""
    pipe = cls()
    expected = pipe.transformer.weight + 1
    with pipe.enable_omni_offload(device=device) as backend:
        with pytest.raises(AttributeError):
            pipe.fuse_lora(["transformer", "nothing"])
        backend.release()
        assert torch.equal(pipe.transformer.weight, expected)
        assert pipe.transformer.weight.device.type == "cpu"
