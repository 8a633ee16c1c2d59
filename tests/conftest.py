"""What every test runs under."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def torch_state():
    """Whatever a test interrupts, torch's own switches are afterwards as they were: a leak would fail some later test."""
    yield
    with torch.device("meta"):
        assert torch.empty(0).device.type == "meta", "torch function modes were left disabled"
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.fixture
def device():
    """Return the simulated accelerator: threads mode, poison on, races recorded; nothing may be left on it, and no race."""
    from omni_offload.testing import sim

    device = sim.install(mode="threads", races="record", poison=True)
    sim.configure(capacity=0, pinned_capacity=0, fail_alloc_in=-1)
    sim.reset_races()
    sim.reset_counters()
    sim.reset_peak()
    yield device
    sim.configure(mode="threads", races="record", poison=True, capacity=0, pinned_capacity=0, fail_alloc_in=-1)
