"""Settings are checked as a whole, read back, and restored."""

import attrs
import pytest
import torch

from omni_offload.errors import OffloadConfigError
from omni_offload.testing import sim


def test_every_problem_is_named_and_nothing_changes(device):
    before = sim.current_settings()
    with pytest.raises(OffloadConfigError) as caught:
        sim.configure(h2d_gbps=-1, devices=9, mode="fast", speed=3, capacity=4096, poison=1, launch=float("nan"))
    for word in ("h2d_gbps", "devices", "'fast'", "'speed'", "poison", "launch"):
        assert word in str(caught.value)
    assert "capacity must" not in str(caught.value)
    assert sim.current_settings() == before


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(sim.Settings)])
def test_wrong_types_are_refused(device, name):
    with pytest.raises(OffloadConfigError, match=name):
        sim.configure(**{name: object()})
    with pytest.raises(OffloadConfigError, match=name):
        sim.install(**{name: object()})


def test_none_leaves_a_setting(device):
    sim.configure(capacity=4096, races="off")
    sim.configure(**dict.fromkeys((field.name for field in attrs.fields(sim.Settings)), None))
    assert (sim.current_settings().capacity, sim.current_settings().races) == (4096, "off")
    with pytest.raises(OffloadConfigError, match="speed"):
        sim.configure(speed=None)


def test_context_restores_after_an_exception(device):
    before = sim.current_settings()
    with pytest.raises(KeyError), sim.settings(capacity=1024, mode="threads", fail_alloc_in=0) as inside:
        assert inside.capacity == sim.current_settings().capacity == 1024
        raise KeyError
    assert sim.current_settings() == before


def test_install_again_only_applies_settings(device):
    module, clock = torch.sim, sim.clock()
    assert sim.install(capacity=512) == torch.device("sim", 0)
    assert torch.sim is module
    assert sim.clock() == clock
    assert sim.current_settings().capacity == 512


def test_devices(device):
    sim.configure(devices=4)
    assert torch.accelerator.device_count() == 4
    assert torch.ones(1, device="sim:3").device.index == 3
    torch.sim.set_device(3)
    sim.configure(devices=1)
    assert torch.sim.current_device() == 0
    with pytest.raises(RuntimeError, match="invalid device index 1"):
        torch.sim.set_device(1)


def test_it_is_available_here(device):
    assert sim.why_unavailable() is None
