"""Lets the tests here import the tables beside them; after each test nothing is left on the device, and no race."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def leaves_nothing(nothing_left):
    """Every test here ends with an empty device, no pinned byte and no race."""
