"""Every case of every registered pipeline keeps the contract, on the simulated accelerator: in float32, and in bfloat16."""

import pytest
import torch
from contract_cases import (
    ALWAYS,
    ALWAYS_IN_LAYER_MODE,
    BFLOAT16,
    CASES,
    LAYER_PARTS,
    LAYER_ROUNDS,
    NOT_IN_BFLOAT16,
    ROUNDS,
    chosen,
    chosen_in_layer_mode,
    rotation,
)

from omni_offload.testing import all_checks, parametrize_with_checks

#: What a run takes follows from its commit; the end of its output says which, and how to take it again.
FIXED = [case for case in CASES if case.name in ALWAYS]
TURN = chosen(CASES)
TURN_BFLOAT16 = chosen(BFLOAT16)
FIXED_IN_LAYER_MODE = [case for case in CASES if case.name in ALWAYS_IN_LAYER_MODE]
TURN_IN_LAYER_MODE, CHECKS_IN_LAYER_MODE = chosen_in_layer_mode(all_checks())


def _note(record_property, cases):
    record_property("rotation", f"OMNI_CONTRACT_ROTATION={rotation()} takes {', '.join(case.name for case in cases)}")


@parametrize_with_checks(FIXED)
def test_contract(check):
    """The pipeline keeps one rule of the contract; where much could be tried, a seeded sample is."""
    check()


@pytest.mark.rotating
@parametrize_with_checks(TURN)
def test_contract_of_a_third(check, record_property):
    """The pipeline keeps one rule of the contract; each run takes a third of the cases."""
    _note(record_property, TURN)
    check()


@pytest.mark.rotating
@parametrize_with_checks(TURN_BFLOAT16)
def test_contract_in_bfloat16(check, record_property):
    """The pipeline keeps one rule of the contract in bfloat16; each run takes a third of the cases."""
    _note(record_property, TURN_BFLOAT16)
    check()


@pytest.mark.exhaustive
@parametrize_with_checks([case for case in (*CASES, *BFLOAT16) if case not in (*FIXED, *TURN, *TURN_BFLOAT16)])
def test_contract_of_the_others(check):
    """The pipeline keeps one rule of the contract, in either type; all the cases that the run does not take anyway."""
    check()


@parametrize_with_checks(FIXED_IN_LAYER_MODE, mode="layer")
def test_contract_in_layer_mode(check):
    """The pipeline keeps one rule of the contract where its blocks stream."""
    check()


@pytest.mark.rotating
@parametrize_with_checks(TURN_IN_LAYER_MODE, mode="layer", checks=CHECKS_IN_LAYER_MODE)
def test_contract_in_layer_mode_of_some(check, record_property):
    """The pipeline keeps one rule of the contract where its blocks stream; each run takes some cases, in either type, and some checks."""
    _note(record_property, TURN_IN_LAYER_MODE)
    check()


@pytest.mark.exhaustive
@parametrize_with_checks([case for case in (*CASES, *BFLOAT16) if case not in FIXED_IN_LAYER_MODE], mode="layer")
def test_contract_in_layer_mode_of_the_others(check):
    """The pipeline keeps one rule of the contract where its blocks stream, in either type."""
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


@pytest.mark.parametrize("cases", [CASES, BFLOAT16], ids=["float32", "bfloat16"])
def test_rotation_takes_every_case(cases):
    """So many turns in a row take every case once that not every run takes; the same commit takes the same cases."""
    turns = [chosen(cases, f"{number:x}") for number in range(ROUNDS)]
    assert sorted(case.name for turn in turns for case in turn) == sorted(case.name for case in cases if case.name not in ALWAYS)
    assert chosen(CASES, rotation()) == TURN
    assert {case.name for case in FIXED} == set(ALWAYS)


def test_rotation_takes_every_check_in_layer_mode():
    """So many turns in a row run every check once on every case, in either type, that not every run takes in mode `layer`."""
    checks = all_checks()
    turns = [chosen_in_layer_mode(checks, f"{number:x}") for number in range(LAYER_ROUNDS * LAYER_PARTS)]
    found = sorted((case.name, check.__name__) for cases, some in turns for case in cases for check in some)
    others = [case.name for case in (*CASES, *BFLOAT16) if case.name not in ALWAYS_IN_LAYER_MODE]
    assert found == sorted((name, check.__name__) for name in others for check in checks)
    assert {case.name for case in FIXED_IN_LAYER_MODE} == set(ALWAYS_IN_LAYER_MODE)
