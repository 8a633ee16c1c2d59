"""Lets the tests here import the tables beside them; after each test nothing is left on the device, and no race."""

import gc
import sys
from pathlib import Path

import pytest

from omni_offload.testing import sim

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left(device):
    """Every test ends with an empty device, no pinned byte and no race."""
    gc.collect()
    before = sim.allocated(), sim.pinned_bytes()
    yield
    gc.collect()
    assert (sim.allocated(), sim.pinned_bytes()) == before
    assert sim.races() == []
