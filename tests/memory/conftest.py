"""The measurements are scripts, which run in processes of their own; the tests import them by name too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
