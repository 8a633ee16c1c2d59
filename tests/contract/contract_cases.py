"""The registered cases; which of them a run takes, and which do not run in bfloat16 at all."""

import os
import subprocess
from pathlib import Path

import torch

import pipelines

CASES = [case for entry in pipelines.registered().values() for case in entry.load_cases()]

#: Cases that do not run in bfloat16 on the host without any offload, each with a part of the error that says why.
NOT_IN_BFLOAT16 = {}

BFLOAT16 = [case.cast(torch.bfloat16) for case in CASES]

#: What every run takes in float32: a DiT with two encoders, a UNet with two co-residents, and a pipeline that drives itself.
ALWAYS = ("flux", "stable_diffusion_multi_controlnet", "wan_2_1_i2v")

#: How many runs take every case once, in either type.
ROUNDS = 3


def rotation() -> str:
    """Return what this run's choice follows from: `OMNI_CONTRACT_ROTATION`, else the commit, else nothing."""
    given = os.environ.get("OMNI_CONTRACT_ROTATION")
    if given:
        return given
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


def chosen(cases, given=None):
    """Return the part of some cases that this run takes beside `ALWAYS`."""
    turn = int(given or rotation(), 16) % ROUNDS
    return [case for case in cases if case.name not in ALWAYS][turn::ROUNDS]
