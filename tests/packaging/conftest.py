"""The wheel, built once for all that look at it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    from clean_environment import ROOT, build_wheel

    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))
