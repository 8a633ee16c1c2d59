"""Lets the tests here import what they have in common, and runs them on one thread, without races."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device():
    from omni_offload.testing import sim

    return sim.install(races="record")


@pytest.fixture(autouse=True)
def no_races(request):
    if "device" not in request.fixturenames:
        yield
        return
    from omni_offload.testing import sim

    request.getfixturevalue("device")
    sim.reset_races()
    yield
    assert sim.races() == []
