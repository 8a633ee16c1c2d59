"""Lets the tests here see the registered cases, and which of them a run takes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
