"""Offload beside FSDP2, tensor and context parallelism, on ranks that are processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "parallel_rank.py"


def run(tmp_path, size, *scenarios):
    """Return, per rank, what each scenario told."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(size), str(tmp_path / "store"), *scenarios],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    found = []
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=600)
            assert process.returncode == 0, f"rank {rank} of {size}:\n{err}"
            found.append({name: told for line in out.splitlines() for name, told in json.loads(line).items()})
    finally:
        for process in ranks:
            process.kill()
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(700)
@pytest.mark.parametrize("size", [2, 4])
def test_beside_other_owners(tmp_path, size):
    """HSDP on a mesh of 2 x 2, and tensor and sequence parallelism with data parallelism of two: what is gathered is halved."""
    for rank in run(tmp_path, size, "hsdp", "tp", "sp"):
        gathered = {"hsdp": 2, "tp": size // 2, "sp": 2}
        assert {name: rank[name]["ranks"] for name in gathered} == gathered
        for name, ranks in gathered.items():
            assert rank[name]["treated"]["transformer"] == "stream"
            assert (rank[name]["held"] > 0) is (ranks > 1)
