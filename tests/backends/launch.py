"""Start ranks that are processes of `gathered_rank.py`, and read what they told."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).parent / "gathered_rank.py")
_LIMIT = 600


def by_torchrun(folder, size, *scenarios):
    """Return, per rank, what each scenario told."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "--log-dir", str(folder / "logs")]
    command = [sys.executable, "-W", "ignore", *launcher, SCRIPT, str(folder), *scenarios]
    ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=_LIMIT, check=False)
    assert ran.returncode == 0, ran.stderr
    return [_read(folder, rank) for rank in range(size)]


def one_by_one(folder, size, *scenarios):
    """As `by_torchrun`, over a file as the store, for scenarios in which a rank is lost: torchrun would end the others."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, str(folder), *scenarios],
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(RANK=str(rank), WORLD_SIZE=str(size)),
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, err = process.communicate(timeout=_LIMIT)
            assert process.returncode == 0, f"rank {rank} of {size}:\n{err}"
    finally:
        for process in ranks:
            process.kill()
    return [_read(folder, rank) for rank in range(size)]


def _environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def _read(folder, rank):
    told = (folder / f"{rank}.jsonl").read_text(encoding="utf-8")
    return {name: value for line in told.splitlines() for name, value in json.loads(line).items()}
