"""What the registered pipelines declare is complete, and the audit would notice if any of it were not."""

import pytest
from contract_cases import CASES, rotation

from omni_offload.testing import audit_pipeline
from omni_offload.testing.audit import Declarations, Item

#: What every run takes: a DiT with two encoders.
ALWAYS = ("flux",)

#: How many other cases a run takes.
SOME = 1

#: What a family leaves undeclared on purpose, and why.
ON_PURPOSE = {
    "wan_animate": {Item("stack", "transformer.face_adapter"): "each runs between two blocks of the other stack; all stay with the rest"},
}

OTHERS = [case for case in CASES if case.name not in ALWAYS]
_TURN = int(rotation(), 16) % len(OTHERS)
TURN = [OTHERS[(_TURN + number) % len(OTHERS)] for number in range(SOME)]
FIXED = [case for case in CASES if case.name in ALWAYS]
REST = [case for case in OTHERS if case not in TURN]


def _leave_out_in_turn(case, record_property):
    report = audit_pipeline(case)
    on_purpose = {*ON_PURPOSE.get(case.name, ())}
    assert {finding.item for finding in report.findings} == on_purpose, report
    declared = Declarations.of(case.make_pipeline())
    assert {*report.needed, *report.not_exercised} == {*declared.items()}
    record_property("audit", f"{case.name}: not exercised: {', '.join(map(str, report.not_exercised)) or 'nothing'}")
    assert report.needed
    for item in report.needed:
        found = audit_pipeline(case, declarations=declared.without(item))
        if item in {finding.item for finding in (*found.findings, *found.suggestions)}:
            assert len(found.findings) > len(on_purpose) or item.kind == "call"
            continue
        right = {read.tensor for read in found.host_reads} - {read.tensor for read in report.host_reads}
        assert item.kind == "entry point", f"{item} of {case.name}: {found}"
        assert any(tensor.startswith(f"{item.path}.") for tensor in right), (
            f"{item} of {case.name}: {found}"
        )  # upstream copies it by itself


@pytest.mark.parametrize("case", FIXED, ids=lambda case: case.name)
def test_what_is_left_out_is_named(case, record_property):
    """A pipeline is clean; without a list entry, a stack or an entry point that it needs that is named, or what is right on the host."""
    _leave_out_in_turn(case, record_property)


@pytest.mark.rotating
@pytest.mark.parametrize("case", TURN, ids=lambda case: case.name)
def test_what_is_left_out_is_named_by_turns(case, record_property):
    """As above; each run takes some of the cases."""
    record_property("rotation", f"OMNI_CONTRACT_ROTATION={rotation()} takes {', '.join(case.name for case in TURN)}")
    _leave_out_in_turn(case, record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", REST, ids=lambda case: case.name)
def test_what_is_left_out_is_named_of_the_others(case, record_property):
    """As above; all the cases that the run does not take anyway."""
    _leave_out_in_turn(case, record_property)


def test_every_case_is_taken():
    """Every case is taken by one of the tests above."""
    assert sorted(case.name for case in (*FIXED, *TURN, *REST)) == sorted(case.name for case in CASES)
    assert {case.name for case in FIXED} == set(ALWAYS)
