"""Every case of every registered pipeline keeps the contract, on the simulated accelerator."""

import pytest

import pipelines
from omni_offload.testing import parametrize_with_checks

CASES = [case for entry in pipelines.registered().values() for case in entry.load_cases()]


@parametrize_with_checks(CASES)
def test_contract(check):
    """The pipeline keeps one rule of the contract; where much could be tried, a seeded sample is."""
    check()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@parametrize_with_checks(CASES, exhaustive=True)
def test_contract_exhaustively(check):
    """The pipeline keeps one rule of the contract at every line, allocation and registration."""
    check()
