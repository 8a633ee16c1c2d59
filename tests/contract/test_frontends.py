"""The kit's front ends, its report, its strict expected failures, and what it leaves of the caller's settings."""

import gc
import json
import subprocess
import sys

import pytest
import torch
from contract_tiny import Tiny, case_of

from omni_offload.errors import ContractViolation, OffloadConfigError
from omni_offload.testing import Bench, NotRun, Outcome, PipelineCase, all_checks, check_pipeline, sim

pytest_plugins = ["pytester"]


def check_that_passes(bench: Bench) -> None:
    """It passes."""
    bench.note = "this was left out"


def check_that_fails(bench: Bench) -> None:
    """It fails."""
    bench.fail("one thing", "another", component="vae")


def check_that_raises(bench: Bench) -> None:
    """It raises."""
    raise ZeroDivisionError("oh")


def check_that_is_not_run(bench: Bench) -> None:
    """It does not apply."""
    raise NotRun("no reason")


MINE = (check_that_passes, check_that_fails, check_that_raises, check_that_is_not_run)


def outcomes(report):
    return {result.check: result.outcome.value for result in report.results if result.check in {c.__name__ for c in MINE}}


def test_outcomes():
    """A check passes, fails (with our error or any other), or is not run, each with its reason."""
    report = check_pipeline(case_of(Tiny), checks=MINE)
    assert outcomes(report) == {
        "check_that_passes": "PASSED",
        "check_that_fails": "FAILED",
        "check_that_raises": "FAILED",
        "check_that_is_not_run": "NOT_RUN",
    }
    reasons = {result.check: result.reason for result in report.results}
    assert reasons["check_that_passes"] == "this was left out"
    assert reasons["check_that_fails"] == "check_that_fails on case 'Tiny', component 'vae': expected one thing; found another"
    assert reasons["check_that_raises"] == "ZeroDivisionError: oh"
    assert reasons["check_that_is_not_run"] == "no reason"
    assert reasons["check_case"] == "not asked for"


def test_raise_for_failures():
    """One error names every failure, and only those."""
    report = check_pipeline(case_of(Tiny), checks=MINE)
    with pytest.raises(ContractViolation, match="2 of 58 checks failed") as caught:
        report.raise_for_failures()
    assert "check_that_fails FAILED" in str(caught.value)
    assert "check_that_raises FAILED" in str(caught.value)
    assert "check_that_passes" not in str(caught.value)
    check_pipeline(case_of(Tiny), checks=[check_that_passes]).raise_for_failures()


def test_expected_failures_are_strict():
    """A failure that is expected is none; a pass that is not expected is one."""
    case = case_of(Tiny, expected_failures={"check_that_fails": "known", "check_that_passes": "known too"})
    report = check_pipeline(case, checks=MINE[:2])
    assert outcomes(report) == {"check_that_passes": "UNEXPECTED_PASS", "check_that_fails": "EXPECTED_FAILURE"}
    with pytest.raises(ContractViolation, match=r"1 of 56 checks failed:\n  check_that_passes UNEXPECTED_PASS: .*known too"):
        report.raise_for_failures()


def test_unknown_names_are_refused():
    """A name that is no check's is an error: in what is asked for, and in what is expected to fail."""
    with pytest.raises(OffloadConfigError, match="checks names check_nothing"):
        check_pipeline(case_of(Tiny), checks=["check_nothing"])
    with pytest.raises(OffloadConfigError, match="expected_failures of case 'Tiny' names check_nothing"):
        check_pipeline(case_of(Tiny, expected_failures={"check_nothing": "x"}))


def test_report_as_text_and_json():
    """The report is a table with a line for each check, and a JSON object with the same."""
    report = check_pipeline(case_of(Tiny), checks=MINE)
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(report.results)
    assert lines[0] == "contract of 'Tiny' on sim:0: 1 PASSED, 2 FAILED, 55 NOT_RUN"
    data = json.loads(report.to_json())
    assert data["counts"]["FAILED"] == 2
    assert {row["check"] for row in data["results"]} == {result.check for result in report.results}
    assert all(row["rule"] for row in data["results"])


def test_a_pipeline_that_does_not_run():
    """Where the resident run fails, the checks that need it fail with its error, and none is missing."""
    case = case_of(Tiny, make_inputs=lambda _: {"nonsense": 1})
    report = check_pipeline(case, checks=["check_protocols", "check_numerics"])
    assert report.named(Outcome.PASSED) == ("check_protocols",)
    assert report.named(Outcome.FAILED) == ("check_numerics",)
    assert "nonsense" in next(result.reason for result in report.results if result.check == "check_numerics")


def test_settings_are_put_back(device):
    """The simulated device's settings, the current stream, the trace function and frozen objects are as before."""
    sim.configure(mode="threads", races="off", poison=False, h2d_gbps=3.0, capacity=123456789)
    stream = torch.Stream(device)
    torch.accelerator.set_stream(stream)
    before, frozen, trace = sim.current_settings(), gc.get_freeze_count(), sys.gettrace()
    try:
        check_pipeline(
            case_of(Tiny),
            checks=["check_streams", "check_races", "check_failing_activations", "check_interrupted_call", "check_second_device"],
        )
        assert sim.current_settings() == before
        assert torch.accelerator.current_stream() == stream
        assert gc.get_freeze_count() == frozen
        assert sys.gettrace() is trace
    finally:
        torch.accelerator.set_stream(torch.sim.default_stream(0))
        sim.configure(races="record", poison=True, h2d_gbps=0.0, capacity=0)


def test_samples_are_seeded():
    """Two runs take the same samples; another seed takes others."""
    from omni_offload.testing.runner import make_bench

    def sample(seed):
        bench = make_bench(case_of(Tiny), seed=seed)
        bench.check = "check_x"
        return bench.sample(list(range(1000)), 5)

    assert sample(0) == sample(0) != sample(1)


def test_importing_imports_no_pytest_and_builds_nothing():
    """Importing the kit imports no pytest, and does not load the simulated device."""
    code = "import sys, omni_offload.testing; print([name for name in sys.modules if name.startswith(('pytest', '_pytest', 'omni_offload.testing.sim'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cases_are_factories():
    """A case is frozen, and takes its fields by keyword only."""
    case = case_of(Tiny)
    with pytest.raises(AttributeError):
        case.name = "other"
    with pytest.raises(TypeError):
        PipelineCase("x", None, None, None)


FRONT_ENDS = """
import sys
sys.path.insert(0, {here!r})
from contract_tiny import HandWritten, Tiny, case_of
from omni_offload.testing import PipelineContractTests, parametrize_with_checks

GOOD, BAD = case_of(HandWritten), case_of(Tiny, expected_failures={{"check_plan": "wrongly"}})

@parametrize_with_checks([GOOD])
def test_each(check):
    if check.check.__name__ in ("check_plan", "check_budget"):
        check()

class TestMine(PipelineContractTests):
    cases = [BAD]
"""


def test_pytest_front_ends(pytester, request):
    """parametrize_with_checks and PipelineContractTests make one test for each check on each case: passed, skipped or failed."""
    pytester.makepyfile(test_mine=FRONT_ENDS.format(here=str(request.path.parent)))
    result = pytester.runpytest("-q", "-k", "test_each or check_plan or check_discovery", "-p", "no:cacheprovider", "--no-header")
    count = len(all_checks())
    result.assert_outcomes(passed=count - 1 + 1, skipped=1, failed=1, deselected=count - 2)
    result.stdout.fnmatch_lines(["*ContractViolation: check_plan UNEXPECTED_PASS: it was expected to fail: wrongly*"])
