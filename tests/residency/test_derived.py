"""Tensors that a module computes from its weights before every forward: never moved, never left on the device."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, remove_weight_norm, spectral_norm, weight_norm

from omni_offload import ModuleResidency
from omni_offload.testing import sim


def pruned(module):
    return prune.random_unstructured(module, "weight", amount=0.5)


@pytest.fixture(params=[weight_norm, spectral_norm, pruned], ids=lambda wrap: wrap.__name__)
def layer(request):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return request.param(nn.Linear(64, 64)).eval()


@pytest.fixture
def normalised():
    """A layer of 65 weights a row of 64: direction, magnitude and bias."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(nn.Linear(64, 64)).eval()


def run(module, device):
    with torch.no_grad():
        return module(torch.ones(2, 64, device=device)).cpu()


def test_computed_on_the_device(layer, device):
    """Every use computes the tensor on the device, from the weights there, and equals a run on the host; none of it stays."""
    expected, seen = run(layer, "cpu"), []
    layer.register_forward_hook(lambda module, *_: seen.append(module.weight.device.type))
    residency = ModuleResidency(layer, device)
    before = sim.allocated()
    for _ in range(2):
        residency.load()
        assert torch.equal(run(layer, device), expected)
        residency.offload()
        assert layer.weight.device.type == "cpu"
        assert sim.allocated() == before
    residency.restore()
    assert seen == ["sim", "sim"]
    assert torch.equal(run(layer, "cpu"), expected)


def test_not_moved(normalised, device):
    """Only the weights that it is computed from are copied and counted, and nothing is copied back."""
    residency = ModuleResidency(normalised, device)
    assert residency.host_bytes == 4 * (64 * 64 + 64 + 64)
    sim.reset_counters()
    for _ in range(2):
        residency.load()
        normalised(torch.ones(2, 64, device=device))
        residency.offload()
    assert residency.counters.bytes_in <= 2 * (residency.host_bytes + 3 * 64)
    assert residency.counters.bytes_out == sim.d2h_bytes() == 0
    residency.restore()


def test_never_computed(normalised, device):
    """One that stands on the meta device, as after loading without initialisation, is no obstacle, and is there again afterwards."""
    expected = run(normalised, "cpu")
    normalised.weight = found = normalised.weight.to("meta")
    residency = ModuleResidency(normalised, device)
    residency.load()
    assert torch.equal(run(normalised, device), expected)
    residency.restore()
    assert normalised.weight.device.type == "meta"
    assert normalised.weight.shape == found.shape
    assert torch.equal(run(normalised, "cpu"), expected)


def test_edits_count(normalised, device):
    """A weight that is edited on the host is in force at the next use."""
    residency = ModuleResidency(normalised, device)
    residency.load()
    before = run(normalised, device)
    residency.offload()
    with torch.no_grad():
        normalised.weight_g.mul_(2)
    expected = run(normalised, "cpu")
    residency.load()
    assert torch.equal(run(normalised, device), expected)
    assert not torch.equal(before, expected)
    residency.restore()


def test_deepcopy_between_uses(normalised, device):
    """What is put back belongs to no graph, so that the module can be copied."""
    residency = ModuleResidency(normalised, device)
    residency.load()
    run(normalised, device)
    residency.offload()
    expected = run(copy.deepcopy(normalised), "cpu")
    assert torch.equal(run(normalised, "cpu"), expected)
    residency.restore()


def test_removed_while_managed(normalised, device):
    """When the normalisation is removed, its result is a weight like any other."""
    residency = ModuleResidency(normalised, device)
    residency.load()
    residency.offload()
    expected = run(normalised, "cpu")
    remove_weight_norm(normalised)
    residency.load()
    assert normalised.weight.device.type == "sim"
    assert torch.allclose(run(normalised, device), expected, atol=1e-6)
    residency.offload()
    assert isinstance(normalised.weight, nn.Parameter)
    assert normalised.weight.device.type == "cpu"
    residency.restore()


@pytest.mark.parametrize("undo", [True, False])
def test_found_on_the_device(normalised, device, undo):
    """One that was computed on the device before is brought to the host; an undo puts it back, the same object."""
    normalised.to(device)
    expected = run(normalised, device)
    found = normalised.weight
    assert found.device.type == "sim"
    residency = ModuleResidency(normalised, device)
    residency.restore(to_origin=True)
    assert normalised.weight is found  # nothing was prepared
    residency.prepare(keep_origin=True)
    assert normalised.weight.device.type == "cpu"
    assert torch.equal(normalised.weight, found.cpu())
    if undo:
        residency.restore(to_origin=True)
        assert normalised.weight is found
        assert torch.equal(run(normalised, device), expected)
        normalised.cpu()
        normalised.weight = normalised.weight.cpu()
    else:
        residency.commit()
        found = None
        residency.restore()
        assert torch.equal(run(normalised, "cpu"), expected)


def test_a_normalisation_removed_while_managed(normalised, device):
    """What was computed is a weight from then on, whole and on the host after restore."""
    residency = ModuleResidency(normalised, device)
    expected = run(normalised, "cpu")
    residency.load()
    residency.offload()
    remove_weight_norm(normalised)
    residency.restore()
    assert normalised.weight.device.type == "cpu"
    assert torch.equal(run(normalised, "cpu"), expected)
