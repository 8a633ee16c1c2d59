"""Pinned bytes: exact, bounded, and given back."""

import gc

import pytest
import torch
from measure import modules_of, weight_bytes

from omni_offload import OffloadConfigError
from omni_offload.testing import sim
from pipelines.flux.cases import FLUX

ALIGNMENT = 64


@pytest.fixture
def flux(device):
    """A tiny Flux, its resident output, and nothing pinned."""
    gc.collect()
    sim.configure(races="raise")
    pipeline = FLUX.make_pipeline()
    expected = FLUX.outputs(FLUX.make_pipeline().to(device)(**FLUX.make_inputs(pipeline)))
    gc.collect()
    sim.reset_counters()
    assert sim.pinned_bytes() == 0
    return pipeline, expected


def _equal(pipeline, expected):
    found = FLUX.outputs(pipeline(**FLUX.make_inputs(pipeline)))
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _tensor_count(pipeline):
    return sum(len(m._parameters) + len(m._buffers) for m in modules_of(pipeline))


def test_exact(flux, device):
    """The weights are pinned to the byte, but for the gaps of alignment; the report says so, and disable gives all back."""
    pipeline, _ = flux
    weights = weight_bytes(pipeline)
    with pipeline.enable_omni_offload("module", device=device) as backend:
        report = backend.report()
        assert report.totals["pinned_bytes"] == report.totals["weight_bytes"] == weights
        assert weights <= sim.pinned_bytes() < weights + ALIGNMENT * _tensor_count(pipeline)
        assert report.pinned_host_bytes == sim.pinned_bytes()
    assert sim.pinned_bytes() == 0


def test_nothing_without_pinning(flux, device):
    """pin_memory=False pins nothing, in a call neither."""
    pipeline, expected = flux
    with pipeline.enable_omni_offload("module", device=device, pin_memory=False) as backend:
        assert _equal(pipeline, expected)
        assert {part.transfer for part in backend.report().components} == {"serial"}
    assert sim.pinned_peak() == 0


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95, 1.1])
@pytest.mark.parametrize("device_memory", [None, "64MiB"])
def test_a_budget_is_an_upper_bound(flux, device, share, device_memory):
    """Weights beyond host_memory stay pageable and are staged: the output is the same, and never is more pinned."""
    pipeline, expected = flux
    weights = weight_bytes(pipeline)
    limit = int(share * weights)
    with (
        pipeline.enable_omni_offload("module", device=device, host_memory=limit, device_memory=device_memory) as backend,
        sim.watch_host(),
    ):
        assert _equal(pipeline, expected)
        assert _equal(pipeline, expected)
        report = backend.report()
    assert 0 < report.pinned_host_bytes <= sim.pinned_peak() <= limit
    transfers = {part.transfer for part in report.components}
    if share > 1:
        assert transfers == {"overlapped"}
    else:
        assert "staged" in transfers
        assert report.totals["pinned_bytes"] < weights
    assert sim.pinned_bytes() == 0


def test_most_of_the_budget_is_used(flux, device):
    """A budget that holds three quarters of the weights pins more than half of them."""
    pipeline, _ = flux
    weights = weight_bytes(pipeline)
    with pipeline.enable_omni_offload("module", device=device, host_memory=weights * 3 // 4) as backend:
        assert backend.report().totals["pinned_bytes"] > weights // 2


@pytest.mark.parametrize("limit", [1, 4096])
def test_a_ring_that_does_not_fit_is_refused(flux, device, limit):
    """Where not even the staging ring fits, enable says so and leaves everything as it was."""
    pipeline, expected = flux
    with pytest.raises(OffloadConfigError, match=f"host_memory={limit}"):
        pipeline.enable_omni_offload("module", device=device, host_memory=limit)
    assert pipeline.offload_backend is None
    assert sim.pinned_peak() == 0
    assert all(tensor.device.type == "cpu" for module in modules_of(pipeline) for tensor in module.parameters(recurse=False))
    with pipeline.enable_omni_offload("module", device=device):
        assert _equal(pipeline, expected)


def test_a_shared_encoder_is_pinned_once(flux, device):
    """Two pipelines with one text encoder share its pinned bytes; the second disable gives them back."""
    pipeline, expected = flux
    other = FLUX.make_pipeline()
    other.register_modules(text_encoder_2=pipeline.text_encoder_2)
    shared = sum(p.nbytes for p in pipeline.text_encoder_2.parameters())
    pipeline.enable_omni_offload("module", device=device)
    one = sim.pinned_bytes()
    other.enable_omni_offload("module", device=device)
    assert sim.pinned_bytes() <= 2 * one - shared
    assert _equal(other, expected)
    pipeline.disable_omni_offload()
    assert sim.pinned_bytes() >= shared
    assert _equal(other, expected)
    other.disable_omni_offload()
    assert sim.pinned_bytes() == 0
