"""The registered cases; which of them a run takes, and which do not run in bfloat16 at all."""

import functools
import os
import subprocess
from pathlib import Path

import attrs
import torch

import pipelines
from pipelines.digits import cases as digits

#: One digit in three steps: ten digits in sixteen steps run the same code, for four times as long.
SHORT = {"digits": functools.partial(digits.make_inputs, prompts=("seven",), steps=3)}

CASES = [
    attrs.evolve(case, make_inputs=SHORT.get(case.name, case.make_inputs))
    for entry in pipelines.registered().values()
    for case in entry.load_cases()
]

#: Cases that do not run in bfloat16 on the host without any offload, each with a part of the error that says why.
NOT_IN_BFLOAT16 = {
    "ddim": "Got unsupported ScalarType BFloat16",
    "ldm": "Input type (float) and bias type (c10::BFloat16) should be the same",
    "pndm": "Input type (float) and bias type (c10::BFloat16) should be the same",
    "score_sde_ve": "Input type (float) and bias type (c10::BFloat16) should be the same",
}

BFLOAT16 = [case.cast(torch.bfloat16) for case in CASES]

#: What every run takes in float32: a DiT with two encoders, a UNet with two co-residents, and a pipeline that drives itself.
ALWAYS = ("flux", "stable_diffusion_multi_controlnet", "wan_2_1_i2v")

#: How many runs take every case once, in either type.
ROUNDS = 3

#: What every run takes in mode `layer` with all checks.
ALWAYS_IN_LAYER_MODE = ("flux",)

#: How many runs take every other case once in mode `layer`, in both types; and, of all checks, how many take each.
LAYER_ROUNDS, LAYER_PARTS = 12, 6


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


def chosen_in_layer_mode(checks, given=None):
    """Return the cases that this run takes in mode `layer` beside `ALWAYS_IN_LAYER_MODE`, and the checks that it runs on them."""
    turn = int(given or rotation(), 16)
    others = [case for case in (*CASES, *BFLOAT16) if case.name not in ALWAYS_IN_LAYER_MODE]
    return others[turn % LAYER_ROUNDS :: LAYER_ROUNDS], checks[turn // LAYER_ROUNDS % LAYER_PARTS :: LAYER_PARTS]
