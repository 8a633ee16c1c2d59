"""Every case of every registered pipeline keeps the contract, on the simulated accelerator."""

import pipelines
from omni_offload.testing import parametrize_with_checks

CASES = [case for entry in pipelines.registered().values() for case in entry.load_cases()]


@parametrize_with_checks(CASES)
def test_contract(check):
    """The pipeline keeps one rule of the contract."""
    check()
