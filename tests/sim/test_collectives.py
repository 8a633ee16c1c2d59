"""Collectives of two processes run on device tensors over gloo, on a stream of their own, and the processes end cleanly."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("backend", "ending"), [("gloo", "destroy"), ("cpu:gloo,sim:gloo", "destroy"), ("gloo", "pending"), ("gloo", "nothing")]
)
def test_two_ranks(tmp_path, backend, ending):
    script = Path(__file__).parent / "collectives_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "store"), backend, ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), err
