"""The registered cases, counted; which of them a run takes in bfloat16, and which do not run in it at all."""

import os
import subprocess
from pathlib import Path

import torch

import pipelines

CASES = [case for entry in pipelines.registered().values() for case in entry.load_cases()]

#: Cases that do not run in bfloat16 on the host without any offload, each with a part of the error that says why.
NOT_IN_BFLOAT16 = {}

BFLOAT16 = [case.cast(torch.bfloat16) for case in CASES]

#: How many runs take every case in bfloat16 once.
ROUNDS = 3


def rotation() -> str:
    """Return what this run's choice follows from: `OMNI_CONTRACT_ROTATION`, else the commit, else nothing."""
    given = os.environ.get("OMNI_CONTRACT_ROTATION")
    if given:
        return given
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


def chosen(given=None):
    """Return the part of the cases in bfloat16 that this run takes."""
    turn = int(given or rotation(), 16) % ROUNDS
    return BFLOAT16[turn::ROUNDS]
