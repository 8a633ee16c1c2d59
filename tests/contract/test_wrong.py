"""Deliberately wrong pipelines: the check of the rule that each breaks finds it, and the other checks that do are pinned."""

import pytest
from contract_wrong import WRONG, case_for

from omni_offload.testing import all_checks, check_pipeline


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: f"{cls.check}-{cls.__name__}")
def test_wrong_pipeline(cls):
    """It fails its check, and beside it exactly those that are listed with a reason."""
    report = check_pipeline(case_for(cls), mode=cls.mode)
    failed = {result.check: result.reason for result in report.failures}
    assert cls.check in failed, str(report)
    assert set(failed) - {cls.check} == set(cls.also), str(report)


def test_every_check_has_a_wrong_pipeline():
    """No check is there that nothing fails."""
    assert {cls.check for cls in WRONG} == {check.__name__ for check in all_checks()}


def test_reasons_are_given():
    """Every further check that a wrong pipeline fails has its reason."""
    for cls in WRONG:
        assert all(isinstance(reason, str) and len(reason) > 5 for reason in cls.also.values()), cls
        assert not set(cls.also) - {check.__name__ for check in all_checks()}, cls
