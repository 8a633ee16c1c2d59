"""Every case of every registered pipeline keeps the contract, on the simulated accelerator: in float32, and in bfloat16."""

import pytest
import torch
from contract_cases import ALWAYS, BFLOAT16, CASES, NOT_IN_BFLOAT16, ROUNDS, chosen, rotation

from omni_offload.testing import parametrize_with_checks

#: What a run takes follows from its commit; the end of its output says which, and how to take it again.
FIXED = {mode: [case for case in CASES if case.name in names] for mode, names in ALWAYS.items()}
TURN = {mode: chosen(mode) for mode in ALWAYS}
OTHERS = {mode: [case for case in (*CASES, *BFLOAT16) if case not in (*FIXED[mode], *TURN[mode])] for mode in ALWAYS}


def _note(record_property, mode):
    names = ", ".join(case.name for case in TURN[mode])
    record_property("rotation", f"OMNI_CONTRACT_ROUNDS={ROUNDS} OMNI_CONTRACT_ROTATION={rotation()} takes in mode {mode}: {names}")


@parametrize_with_checks(FIXED["module"])
def test_contract(check):
    """The pipeline keeps one rule of the contract; where much could be tried, a seeded sample is."""
    check()


@parametrize_with_checks(FIXED["layer"], mode="layer")
def test_contract_in_layer_mode(check):
    """The pipeline keeps one rule of the contract where its blocks stream."""
    check()


@pytest.mark.rotating
@parametrize_with_checks(TURN["module"])
def test_contract_of_a_part(check, record_property):
    """The pipeline keeps one rule of the contract, in its type; each run takes a part of the cases."""
    _note(record_property, "module")
    check()


@pytest.mark.rotating
@parametrize_with_checks(TURN["layer"], mode="layer")
def test_contract_in_layer_mode_of_a_part(check, record_property):
    """The pipeline keeps one rule of the contract where its blocks stream, in its type; each run takes a part of the cases."""
    _note(record_property, "layer")
    check()


@pytest.mark.exhaustive
@parametrize_with_checks(OTHERS["module"])
def test_contract_of_the_others(check):
    """The pipeline keeps one rule of the contract, in either type; all the cases that the run does not take anyway."""
    check()


@pytest.mark.exhaustive
@parametrize_with_checks(OTHERS["layer"], mode="layer")
def test_contract_in_layer_mode_of_the_others(check):
    """The pipeline keeps one rule of the contract where its blocks stream, in either type; all that the run does not take anyway."""
    check()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@parametrize_with_checks(CASES, exhaustive=True)
def test_contract_exhaustively(check):
    """The pipeline keeps one rule of the contract at every line, allocation and registration."""
    check()


def _marked(case):
    """Return a case in bfloat16: taken in every run where it is named, else in its turn."""
    if case.name.partition("[")[0] in NOT_IN_BFLOAT16:
        return case
    taken = case in TURN["module"] or case in TURN["layer"]
    return pytest.param(case, marks=pytest.mark.rotating if taken else pytest.mark.exhaustive)


@pytest.mark.parametrize("case", [_marked(case) for case in BFLOAT16], ids=lambda case: case.name)
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


@pytest.mark.parametrize("mode", ALWAYS)
def test_rotation_takes_every_case(mode):
    """So many turns in a row take every case in either type once that not every run takes; the same commit takes the same cases."""
    turns = [chosen(mode, f"{number:x}") for number in range(ROUNDS)]
    names = [case.name for case in (*CASES, *BFLOAT16)]
    assert sorted(case.name for turn in turns for case in turn) == sorted(name for name in names if name not in ALWAYS[mode])
    assert chosen(mode, rotation()) == TURN[mode]
    assert {case.name for case in FIXED[mode]} == set(ALWAYS[mode])
    assert sorted(case.name for case in (*FIXED[mode], *TURN[mode], *OTHERS[mode])) == sorted(names)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_turns_are_of_one_size(number):
    """Every turn takes about as much: of each mode, in each type, as many cases as any other, but for those that every run takes."""
    for mode, fixed in ALWAYS.items():
        kinds = {None: 0, torch.bfloat16: 0}
        for case in chosen(mode, f"{number:x}"):
            kinds[case.dtype] += 1
        assert all(abs(found - len(CASES) / ROUNDS) < 1 + len(fixed) for found in kinds.values()), (mode, kinds)
