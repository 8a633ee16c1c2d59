"""Lets the tests here, and what they scaffold, import the upstream cases beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
