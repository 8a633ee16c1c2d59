"""Every case of every registered pipeline keeps the contract, on the simulated accelerator: in float32, and in bfloat16."""

import pytest
import torch
from contract_cases import BFLOAT16, CASES, NOT_IN_BFLOAT16, ROUNDS, chosen, rotation

from omni_offload.testing import parametrize_with_checks

#: What a run takes follows from its commit; the end of its output says which, and how to take it again.
TURN = chosen()


@parametrize_with_checks(CASES)
def test_contract(check):
    """The pipeline keeps one rule of the contract; where much could be tried, a seeded sample is."""
    check()


@pytest.mark.rotating
@parametrize_with_checks(TURN)
def test_contract_in_bfloat16(check, record_property):
    """The pipeline keeps one rule of the contract in bfloat16; each run takes a third of the cases."""
    record_property("rotation", f"OMNI_CONTRACT_ROTATION={rotation()} takes {', '.join(case.name for case in TURN)}")
    check()


@pytest.mark.exhaustive
@parametrize_with_checks([case for case in BFLOAT16 if case not in TURN])
def test_contract_in_bfloat16_of_the_others(check):
    """The pipeline keeps one rule of the contract in bfloat16; all the cases that the run does not take anyway."""
    check()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@parametrize_with_checks(CASES, exhaustive=True)
def test_contract_exhaustively(check):
    """The pipeline keeps one rule of the contract at every line, allocation and registration."""
    check()


@pytest.mark.parametrize("case", BFLOAT16, ids=lambda case: case.name)
def test_who_runs_in_bfloat16(case):
    """Without any offload, on the host, a case runs in bfloat16, or it is named with the error that it ends in."""
    expected = NOT_IN_BFLOAT16.get(case.name.partition("[")[0], "")
    pipeline, problem = case.make_pipeline(), ""
    try:
        with torch.no_grad():
            case.outputs(pipeline(**case.make_inputs(pipeline)))
    except (RuntimeError, TypeError, ValueError) as error:
        problem = str(error)
    assert bool(problem) is bool(expected), problem or f"{case.name} runs; take it out of NOT_IN_BFLOAT16"
    assert expected in problem


def test_rotation_takes_every_case():
    """So many turns in a row take every case in bfloat16 once; the same commit takes the same cases."""
    turns = [chosen(f"{number:x}") for number in range(ROUNDS)]
    assert sorted(case.name for turn in turns for case in turn) == sorted(case.name for case in BFLOAT16)
    assert chosen(rotation()) == TURN
