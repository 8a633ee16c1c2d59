"""One checkpoint that two processes stream from: the node holds it once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("measure_mapped.py")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc, as Linux has it")


def test_two_processes_hold_one_copy():
    """The proportional set sizes of a mapped checkpoint add up to one copy; without mapping there are two. Outputs are the same."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    weights = found["mapped"]["weights"]
    assert weights > 128 * MIB
    for kind in found.values():
        assert all(rank["equal"] and rank["races"] == 0 for rank in kind["ranks"]), found
    mapped, own = found["mapped"]["ranks"], found["own"]["ranks"]
    assert 0.9 * weights <= sum(rank["file"] for rank in mapped) <= 1.1 * weights, found
    assert sum(rank["grown"] - rank["pinned"] for rank in mapped) <= 1.1 * weights, found
    assert sum(rank["grown"] for rank in own) >= 1.9 * weights, found
