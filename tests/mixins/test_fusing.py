"""Adapters are fused on the device, and what was written there through `.data` is kept."""

import gc
import inspect

import pytest
import torch
from torch import nn

from omni_offload import ModuleResidency, OffloadPlan, OmniOffloadMixin
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


# ---- blocks that stream -----------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """One layer with an adapter that is merged as peft does it: by name, through `.data`, or (safely) by another tensor there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.seen = []

    def merge(self, safe_merge=False, adapter_names=None):
        self.seen.append((self.weight.device.type, adapter_names))
        if safe_merge:
            self.weight.data = self.weight.data + 1
        else:
            self.weight.data += 1

    def unmerge(self):
        self.weight.data -= 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Adapted(), Adapted()
        self.plain = nn.Linear(8, 8)
        self.merge = None  # no method

    def forward(self, x):
        return self.plain(x + self.first.weight.sum() + self.second.weight[0, 0])


class Model(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(depth)), Adapted()

    def forward(self, x):
        for block in reversed(self.blocks):  # another order than fusing takes
            x = block(x)
        return x + self.last.weight.sum()

    def adapted(self):
        return [module for module in self.modules() if isinstance(module, Adapted)]


class LayerUpstream:
    """Fuses as diffusers does: it calls `merge` of every layer with an adapter, after a look at its signature."""

    def __init__(self):
        torch.manual_seed(0)
        self.transformer = Model().requires_grad_(False)
        self.fail_at = None

    def fuse_lora(self, components=("transformer",), safe=False):
        for _ in components:
            for number, layer in enumerate(self.transformer.adapted()):
                if number == self.fail_at:
                    raise ValueError("told to")
                assert "adapter_names" in inspect.signature(layer.merge).parameters
                layer.merge(safe_merge=safe, adapter_names=["one"])

    def unfuse_lora(self, components=("transformer",)):
        for _ in components:
            for layer in self.transformer.adapted():
                layer.unmerge()

    def __call__(self, x):
        return self.transformer(x)


class Layered(OmniOffloadMixin, LayerUpstream):
    _dit_modules = ["transformer"]
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("keys", [{}, {"slots": 2, "pin_memory": False}, {"layer_options": {"dit": {"resident_layers": 2}}}], ids=str)
def test_blocks_that_stream_are_fused_on_the_device(device, keys, safe):
    """One after the other, within the slots; the order that was learned is kept, and nothing is left of it on the layers."""
    plain, pipe, x = Layered(), Layered(), torch.randn(2, 8)
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        pipe(x)
        most = backend.report().peak_device_bytes
        for change in ("fuse_lora", "unfuse_lora", "fuse_lora"):
            for one in (plain, pipe):
                getattr(one, change)(**({"safe": True} if safe and change == "fuse_lora" else {}))
            assert {tensor.device.type for tensor in pipe.transformer.parameters()} == {"cpu"}
            misses = backend.report().components[0].misses
            assert torch.equal(pipe(x).cpu(), plain(x))
            assert backend.report().components[0].misses - misses <= 1  # the rest
        layers = pipe.transformer.adapted()
        assert [layer.seen for layer in layers] == [[(device.type, ["one"])] * 2] * len(layers)
        assert not any("merge" in vars(layer) or "unmerge" in vars(layer) for layer in layers)
        assert backend.report().peak_device_bytes == most
    for got, want in zip(pipe.transformer.parameters(), plain.transformer.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_failure_while_blocks_are_fused(device):
    """What was fused before it is kept, the blocks leave the device, and the layers have their own methods again."""
    plain, pipe, x = Layered(), Layered(), torch.randn(2, 8)
    plain.fail_at = pipe.fail_at = 5
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        for one in (plain, pipe):
            with pytest.raises(ValueError, match="told to"):
                one.fuse_lora()
        backend.release()
        assert sum(part.resident_bytes for part in backend.report().components) == 0
        assert not any("merge" in vars(layer) for layer in pipe.transformer.adapted())
        assert torch.equal(pipe(x).cpu(), plain(x))


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


def test_what_takes_the_place_of_a_weight_goes_to_the_host(device):
    """Fused safely, a weight is another tensor on the device: as soon as that is done it is on the host too, and managed."""
    plain, pipe, x = Layered(), Layered(), torch.randn(2, 8)
    with pipe.enable_omni_offload(device=device) as backend, torch.no_grad():
        for one in (plain, pipe):
            one.fuse_lora(safe=True)
        assert {tensor.device.type for tensor in pipe.transformer.parameters()} == {"cpu"}
        backend.release()
        gc.collect()
        assert sim.allocated() == 0
        assert torch.equal(pipe(x).cpu(), plain(x))
