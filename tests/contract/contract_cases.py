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
    "cosmos_video_to_world": "\"avg_pool3d_out_frame\" not implemented for 'BFloat16'",
    "ddim": "Got unsupported ScalarType BFloat16",
    "ldm": "Input type (float) and bias type (c10::BFloat16) should be the same",
    "lucy_edit": "Input type (float) and bias type (c10::BFloat16) should be the same",
    "pndm": "Input type (float) and bias type (c10::BFloat16) should be the same",
    "score_sde_ve": "Input type (float) and bias type (c10::BFloat16) should be the same",
}

BFLOAT16 = [case.cast(torch.bfloat16) for case in CASES]

#: What every run takes in float32, by mode: a DiT with two encoders, a UNet with two co-residents, and a pipeline that drives itself.
ALWAYS = {"module": ("flux", "stable_diffusion_multi_controlnet", "wan_2_1_i2v"), "layer": ("flux",)}

#: How many runs take everything else once: every case, in either type, in either mode. By default a run has about five minutes of two
#: cores for its part; where there are 24 cores, OMNI_CONTRACT_ROUNDS=3 takes a third in as long. `make test-all` takes all.
ROUNDS = int(os.environ.get("OMNI_CONTRACT_ROUNDS", "36"))


def rotation() -> str:
    """Return what this run's choice follows from: `OMNI_CONTRACT_ROTATION`, else the commit, else nothing."""
    given = os.environ.get("OMNI_CONTRACT_ROTATION")
    if given:
        return given
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


def chosen(mode, given=None):
    """Return the cases, of both types, that this run takes in a mode beside `ALWAYS`: of every mode and type about as many."""
    turn = int(given or rotation(), 16) % ROUNDS
    kinds = [("module", CASES), ("layer", CASES), ("module", BFLOAT16), ("layer", BFLOAT16)]
    return [
        case
        for kind, (of_mode, cases) in enumerate(kinds)
        for number, case in enumerate(cases)
        if of_mode == mode and case.name not in ALWAYS[mode] and (number + kind * ROUNDS // len(kinds)) % ROUNDS == turn
    ]
