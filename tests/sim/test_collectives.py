"""Collectives of two processes run on device tensors over gloo, on a stream of their own, and the processes end cleanly."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("backend", "ending", "parts"),
    [
        ("gloo", "destroy", "plain asynchronous in_threads_mode on_a_side_stream timed functional sharded_module"),
        ("cpu:gloo,sim:gloo", "destroy", "plain batched"),
        ("gloo", "pending", "asynchronous"),
        ("gloo", "nothing", "asynchronous"),
    ],
)
def test_two_ranks(tmp_path, backend, ending, parts):
    script = Path(__file__).parent / "collectives_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "store"), backend, ending, *parts.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), err
