"""Every test here runs on the software accelerator, from default settings, and leaves no setting, race or stream behind."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import attrs
import pytest
import torch

from omni_offload.testing import sim


@pytest.fixture(scope="session", autouse=True)
def _installed():
    torch.set_num_threads(1)
    sim.install()  # once: where it fails, it would fail for every test


@pytest.fixture(autouse=True)
def device(_installed):
    """The first device, fresh."""
    where = sim.install(**attrs.asdict(sim.Settings()))
    for index in range(torch.sim.device_count()):
        torch.sim.synchronize(index)
    sim.reset_races()
    sim.reset_counters()
    yield where
    for index in range(torch.sim.device_count()):
        torch.sim.synchronize(index)
    sim.configure(**attrs.asdict(sim.Settings()))
    torch.sim.set_device(0)
    for index in range(torch.sim.device_count()):
        torch.sim.set_stream(torch.sim.default_stream(index))
    torch.sim.set_device(0)
