"""The kit's front ends, its report, its strict expected failures, and what it leaves of the caller's settings."""

import gc
import json
import subprocess
import sys
import time

import attrs
import pytest
import torch
from contract_tiny import Saving, Tiny, case_of

from omni_offload.errors import ContractViolation, OffloadConfigError
from omni_offload.testing import (
    Bench,
    NotRun,
    Outcome,
    PipelineCase,
    PipelineContractTests,
    all_checks,
    check_pipeline,
    parametrize_with_checks,
    sim,
)

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
    with pytest.raises(ContractViolation, match=rf"2 of {len(all_checks()) + 4} checks failed") as caught:
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
    with pytest.raises(
        ContractViolation, match=rf"1 of {len(all_checks()) + 2} checks failed:\n  check_that_passes UNEXPECTED_PASS: .*known too"
    ):
        report.raise_for_failures()


class SavedByNobody(Saving):
    """Lacks a part of what would be needed to load it, whether it is enabled or not."""

    @classmethod
    def from_pretrained(cls, folder):
        raise ValueError(f"{folder} has a part of which there is no class")


class SavedWhileDisabled(Saving):
    """Is not saved while it is enabled."""

    def save_pretrained(self, folder):
        if self.offload_backend is not None:
            raise ValueError("its weights are somewhere")
        super().save_pretrained(folder)


@pytest.mark.parametrize(("cls", "hinted"), [(SavedByNobody, True), (SavedWhileDisabled, False)])
def test_what_cannot_be_saved_without_offload_either_is_said_to_be(cls, hinted):
    """Where saving and loading fail by themselves the report says so, and where to note it; else it is the offload's fault."""
    (failure,) = check_pipeline(case_of(cls), checks=["check_save_pretrained"]).failures
    assert failure.reason.startswith("ValueError: ")
    assert ("without offload either" in failure.reason) is hinted


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
    assert lines[0] == f"contract of 'Tiny' on sim:0: 1 PASSED, 2 FAILED, {len(all_checks()) + 1} NOT_RUN"
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
        assert (gc.get_freeze_count() > 0) is (frozen > 0)
        assert gc.get_freeze_count() <= frozen  # a frozen object that dies is counted no more
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


WITHOUT_PYTEST = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytest", "_pytest"):
            raise ImportError(f"{{name}} is not installed")

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {here!r})
from contract_tiny import Tiny, case_of
from omni_offload.testing import Outcome, all_checks, check_pipeline

report = check_pipeline(case_of(Tiny))
report.raise_for_failures()
print(len(report.named(Outcome.PASSED)), len(report.named(Outcome.NOT_RUN)), len(all_checks()))
"""


def test_checks_run_without_pytest(request):
    """check_pipeline runs every check where pytest cannot be imported."""
    code = WITHOUT_PYTEST.format(here=str(request.path.parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    passed, left_out, count = map(int, done.stdout.split()[-3:])
    assert passed + left_out == count == len(all_checks())
    assert passed > 50


BROKEN_REASONS = {
    "no reason": {"check_plan": ""},
    "a blank reason": {"check_plan": "  "},
    "no text": {"check_plan": 3},
    "no name": {3: "a reason"},
    "no mapping": ["check_plan"],
}


@pytest.mark.parametrize("how", BROKEN_REASONS)
def test_expected_failures_need_reasons(how):
    """What is expected to fail is a mapping of names to texts that say why; anything else is refused where the case is made."""
    with pytest.raises(OffloadConfigError, match="expected_failures of case 'Tiny'"):
        case_of(Tiny, expected_failures=BROKEN_REASONS[how])


def test_front_ends_refuse_unknown_failures():
    """The pytest front ends refuse a name that is no check's as check_pipeline does."""
    case = case_of(Tiny, expected_failures={"check_nothing": "x"})
    with pytest.raises(OffloadConfigError, match="expected_failures of case 'Tiny' names check_nothing"):
        parametrize_with_checks([case])
    with pytest.raises(OffloadConfigError, match="check_nothing"):
        type("TestMine", (PipelineContractTests,), {"cases": [case]})


class Noisy(Tiny):
    """Its weights are others every time."""

    def __init__(self):
        super().__init__()
        self.vae.decoder.bias.data += time.perf_counter() % 1


def _raise(*_):
    raise LookupError("the model is not there")


BROKEN_CASES = {
    "make_pipeline raises": ({"make_pipeline": _raise}, "LookupError: the model is not there [raised by make_pipeline() of case 'Tiny'"),
    "make_pipeline returns None": ({"make_pipeline": lambda: None}, "expected make_pipeline() to return a pipeline; found None"),
    "make_inputs raises": ({"make_inputs": _raise}, "LookupError: the model is not there [raised by make_inputs() of case 'Tiny'"),
    "make_inputs returns a list": (
        {"make_inputs": lambda _: [1]},
        "expected make_inputs() to return a dict of keyword arguments; found list",
    ),
    "outputs raises": ({"outputs": _raise}, "LookupError: the model is not there [raised by outputs() of case 'Tiny'"),
    "outputs returns a tensor": ({"outputs": lambda result: result}, "expected outputs() to return a list of tensors; found Tensor"),
    "outputs returns texts": ({"outputs": lambda _: ["a"]}, "expected outputs() to return a list of tensors; found ['str']"),
    "outputs are nothing": ({"outputs": lambda _: []}, "expected outputs to return tensors; found none"),
    "outputs are NaN": (
        {"outputs": lambda result: [result * float("nan")]},
        "expected finite outputs without offload; found NaN or infinity",
    ),
    "outputs differ": ({"make_pipeline": Noisy}, "expected a deterministic case: outputs of another fresh pipeline"),
}


@pytest.mark.parametrize("how", BROKEN_CASES)
def test_broken_cases_are_told(how):
    """Where the case itself is wrong, the report says so, and which of its functions it was."""
    fields, told = BROKEN_CASES[how]
    report = check_pipeline(attrs.evolve(case_of(Tiny), **fields), checks=["check_case"])
    (failure,) = report.failures
    assert told in failure.reason


class OnlyFloat32(Tiny):
    """Runs in one type only."""

    def denoise(self, latents, *args, **kwargs):
        if latents.dtype is not torch.float32:
            raise RuntimeError("no kernel for this type")
        return super().denoise(latents, *args, **kwargs)


def test_cases_in_another_type():
    """A case in another type is named so and passes; one that does not run in it without offload is not run, with the error."""
    report = check_pipeline(case_of(Tiny), dtype=torch.bfloat16, checks=["check_numerics", "check_state_dict"])
    assert report.case == "Tiny[bfloat16]"
    assert report.named(Outcome.PASSED) == ("check_numerics", "check_state_dict")
    report = check_pipeline(case_of(OnlyFloat32), dtype=torch.bfloat16, checks=["check_numerics", "check_protocols"])
    assert report.named(Outcome.PASSED) == report.named(Outcome.FAILED) == ()
    reason = next(result.reason for result in report.results if result.check == "check_numerics")
    assert reason == "the pipeline does not run in bfloat16 without offload: RuntimeError: no kernel for this type"


def test_casting_leaves_what_a_model_keeps():
    """Floating weights and buffers are cast, each once; whole numbers, and what the model keeps in float32, are not."""
    pipeline = case_of(Tiny).cast(torch.bfloat16).make_pipeline()
    assert {tensor.dtype for part in pipeline.parts().values() for tensor in part.parameters()} == {torch.bfloat16}
    assert pipeline.text_encoder.scale.dtype is torch.bfloat16
    assert pipeline.text_encoder.head.weight is pipeline.text_encoder.embed.weight

    class Keeps(Tiny):
        def __init__(self):
            super().__init__()
            self.vae._keep_in_fp32_modules = ["decoder"]
            self.transformer._keep_in_fp32_modules = ["blocks"]
            self.transformer._keep_in_fp32_modules_strict = None
            self.vae.register_buffer("steps", torch.tensor(3))

    kept = case_of(Keeps).cast(torch.bfloat16).make_pipeline()
    assert kept.vae.decoder.weight.dtype is torch.float32
    assert kept.vae.encoder.weight.dtype is torch.bfloat16
    assert kept.vae.steps.dtype is torch.int64
    assert kept.transformer.blocks[0].weight.dtype is torch.bfloat16
    assert case_of(Keeps).cast(torch.float16).make_pipeline().transformer.blocks[0].weight.dtype is torch.float32


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
