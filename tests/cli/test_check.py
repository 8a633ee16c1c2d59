"""`omni-offload check` runs the contract and says how it ended: for people, for programs, and as an exit status."""

import importlib
import json
import os
import signal
import sys

import pytest
import torch
from rich.console import Console

import pipelines
from omni_offload.cli import app
from omni_offload.cli import check as checking
from omni_offload.config import OffloadMode
from omni_offload.testing import CheckReport, CheckResult, Outcome, all_checks, sim
from pipelines import PipelineEntry

QUICK = ("--checks", "protocols,discovery")

MODULE = """
import torch
from omni_offload import OmniOffloadMixin
from omni_offload.testing import PipelineCase


class Good(OmniOffloadMixin):
    _dit_modules = ["net"]

    def __init__(self):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU(), torch.nn.Linear(4, 4))

    def __call__(self, x):
        return self.net(x.to(self.net[0].weight))


class Wrong(Good):
    def __init__(self):
        super().__init__()
        self.forgotten = torch.nn.Linear(4, 4)


def case(cls, **more):
    return PipelineCase(
        name=cls.__name__.lower(), make_pipeline=cls, make_inputs=lambda _: {"x": torch.ones(2, 4)}, outputs=lambda y: [y], **more
    )


GOOD = case(Good)
WRONG = case(Wrong)
EXPECTED = case(Wrong, expected_failures={"check_discovery": "a [known] gap"})
STALE = case(Good, expected_failures={"check_discovery": "it was so once"})
BOTH = [GOOD, WRONG]
NUMBER = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a function that makes `MODULE:NAME` of the module above, which lies in the working folder."""
    (tmp_path / "mine_cases.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "mine_cases", raising=False)
    importlib.invalidate_caches()
    yield lambda name: f"mine_cases:{name}"
    sys.modules.pop("mine_cases", None)


@pytest.fixture
def check_json(cli):
    """Return a function that runs `check --json` and returns the status and what it printed."""

    def run(*arguments):
        status, out, err = cli("check", *arguments, "--json")
        assert err == ""
        return status, json.loads(out)

    return run


def outcomes(case):
    return {result["check"]: result["outcome"] for result in case["results"] if result["reason"] != "not asked for"}


# ---- what is checked -----------------------------------------------------------------------------------------------------------


def test_a_registered_pipeline_is_checked_as_a_table(cli):
    status, out, err = cli("check", "digits", "--checks", "protocols,check_discovery", "--checks", "execution_device")
    assert (status, err) == (0, "")
    for part in ("digits on sim:0", "check_protocols", "check_execution_device", "PASSED", "Every module with parameters stands in a list"):
        assert part in out
    assert out.splitlines()[-1].startswith("1 case: all right (3 PASSED; ")
    assert "NOT_RUN" not in out
    assert "\x1b" not in out


def test_every_case_of_a_pipeline_is_checked(check_json):
    status, told = check_json("wan", *QUICK)
    assert status == 0
    assert [case["case"] for case in told["cases"]] == [case.name for case in pipelines.registered()["wan"].load_cases()]
    assert {case["target"] for case in told["cases"]} == {"wan"}


def test_the_json_has_every_check_and_its_schema(check_json, mine):
    status, told = check_json(mine("GOOD"), *QUICK)
    assert status == 0
    assert set(told) == {"good", "interrupted", "seed", "exhaustive", "seconds", "counts", "without_cases", "cases"}
    (case,) = told["cases"]
    assert set(case) == {"target", "dtype", "seconds", "case", "device", "mode", "counts", "results"}
    assert [result["check"] for result in case["results"]] == [check.__name__ for check in all_checks()]
    assert all(set(result) == {"check", "rule", "outcome", "reason", "seconds"} for result in case["results"])
    assert (told["good"], told["interrupted"], told["seed"], told["exhaustive"]) == (True, False, 0, False)
    assert told["counts"] == case["counts"]
    assert set(told["counts"]) == {outcome.value for outcome in Outcome}


def test_a_case_of_a_module_in_the_working_folder_passes_the_whole_contract(check_json, mine):
    path = list(sys.path)
    status, told = check_json(mine("GOOD"))
    assert (status, told["counts"]["FAILED"]) == (0, 0), [r for r in told["cases"][0]["results"] if r["outcome"] == "FAILED"]
    assert told["counts"]["PASSED"] > 35
    assert sys.path == path


def test_several_targets_are_one_document(check_json, mine):
    status, told = check_json(mine("GOOD"), "digits", mine("GOOD"), *QUICK)
    assert status == 0
    assert [case["case"] for case in told["cases"]] == ["good", "digits"]


def test_all_checks_every_registered_pipeline_and_names_those_without_cases(cli, check_json, monkeypatch):
    entries = {name: entry for name, entry in pipelines.registered().items() if name in ("digits", "flux")}
    entries["bare"] = PipelineEntry("bare", pipeline="pipelines.flux.pipeline_flux:OmniFluxPipeline")
    monkeypatch.setattr(pipelines, "registered", lambda: entries)
    status, told = check_json("--all", *QUICK)
    assert status == 0
    assert {case["target"] for case in told["cases"]} == {"digits", "flux"}
    assert told["without_cases"] == ["bare"]
    _, out, _ = cli("check", "--all", *QUICK)
    assert "bare has no case" in out
    assert f"{len(told['cases'])} cases: all right" in out


def test_a_folder_is_called_as_a_registered_case_of_its_class(check_json):
    from pipelines.digits.cases import CHECKPOINT

    status, out = check_json(str(CHECKPOINT), "--checks", "execution_device")
    assert status == 0
    (case,) = out["cases"]
    assert (case["target"], case["case"]) == (str(CHECKPOINT), "checkpoint")
    assert outcomes(case) == {"check_execution_device": "PASSED"}


# ---- how it ends ---------------------------------------------------------------------------------------------------------------


def test_a_failure_is_status_1_with_its_reason_first_in_the_table(cli, mine):
    status, out, _ = cli("check", mine("WRONG"), *QUICK)
    assert status == 1
    rows = [line for line in out.splitlines() if "check_" in line]
    assert "check_discovery" in rows[0]
    assert "FAILED" in rows[0]
    assert "forgotten" in rows[0]
    assert out.splitlines()[-1].startswith("1 case: 1 with failures (1 PASSED, 1 FAILED; ")


def test_a_failure_is_status_1_with_its_reason_in_the_json(check_json, mine):
    status, told = check_json(mine("BOTH"), *QUICK)
    assert (status, told["good"]) == (1, False)
    good, wrong = told["cases"]
    assert outcomes(good)["check_discovery"] == "PASSED"
    (found,) = [result for result in wrong["results"] if result["outcome"] == "FAILED"]
    assert found["check"] == "check_discovery"
    assert "forgotten" in found["reason"]


def test_an_expected_failure_is_right_and_shown_with_its_reason(cli, mine):
    status, out, _ = cli("check", mine("EXPECTED"), *QUICK)
    assert status == 0
    assert "EXPECTED_FAILURE" in out
    assert "a [known] gap" in out


def test_an_unexpected_pass_is_status_1(cli, mine):
    status, out, _ = cli("check", mine("STALE"), *QUICK)
    assert status == 1
    assert "UNEXPECTED_PASS" in out
    assert "it was so once" in out


# ---- options -------------------------------------------------------------------------------------------------------------------


def test_options_reach_the_checks(check_json, mine, monkeypatch):
    seen = {}
    run = checking.check_pipeline

    def watched(case, **options):
        seen.update(options, dtype=case.make_pipeline().net[0].weight.dtype)
        return run(case, **options)

    monkeypatch.setattr(checking, "check_pipeline", watched)
    status, told = check_json(mine("GOOD"), *QUICK, "--exhaustive", "--seed", "7", "--device", "sim:1", "--dtype", "bf16")
    assert status == 0
    assert (seen["exhaustive"], seen["seed"], seen["device"], seen["dtype"]) == (True, 7, "sim:1", torch.bfloat16)
    assert (told["seed"], told["exhaustive"]) == (7, True)
    assert (told["cases"][0]["device"], told["cases"][0]["dtype"]) == ("sim:1", "bfloat16")


def test_several_types_are_checked_one_after_the_other(check_json, mine):
    status, told = check_json(mine("GOOD"), "--checks", "numerics", "--dtype", "fp32", "--dtype", "bf16")
    assert status == 0
    assert [case["dtype"] for case in told["cases"]] == ["float32", "bfloat16"]
    assert [case["case"] for case in told["cases"]] == ["good[float32]", "good[bfloat16]"]
    assert all(outcomes(case) == {"check_numerics": "PASSED"} for case in told["cases"])


def test_layer_mode_is_checked_and_told(cli, check_json):
    status, told = check_json("digits", "--mode", "layer", "--checks", "numerics")
    assert status == 0
    assert [case["mode"] for case in told["cases"]] == ["layer"]
    assert outcomes(told["cases"][0]) == {"check_numerics": "PASSED"}
    status, out, _ = cli("check", "digits", "--mode", "layer", "--checks", "protocols")
    assert status == 0
    assert "digits in mode layer on sim:0: 1 PASSED" in out


def test_where_nothing_streams_no_check_of_layer_mode_counts_as_passed(check_json, mine):
    status, told = check_json(mine("GOOD"), "--mode", "layer")
    assert status == 0
    assert told["counts"]["NOT_RUN"] == len(all_checks())
    assert {result["reason"] for result in told["cases"][0]["results"]} == {
        "no component streams: no stack of two or more blocks is declared; see OffloadPlan.block_attrs"
    }


# ---- bad input -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to check"),
        (("digits", "--all"), "both targets and --all"),
        (("digitz",), "did you mean 'digits'?"),
        (("./missing",), "no local folder"),
        (("no_such_module:CASE",), "there is no module 'no_such_module'"),
        (("pipelines.no_such_part:CASE",), "there is no module 'pipelines.no_such_part'"),
        (("mine_cases:MISSING",), "has no 'MISSING'; its cases are: GOOD, WRONG, EXPECTED, STALE"),
        (("mine_cases:NUMBER",), "a int and no PipelineCase"),
        (("broken_cases:CASE",), "ZeroDivisionError: division by zero"),
        (("digits", "--checks", "numericz"), "did you mean 'check_numerics'?"),
        (("digits", "--checks", "xyzzy"), "there are: check_case"),
        (("digits", "--checks", ","), "names no check"),
        (("digits", "--dtype", "int8"), "fp32, bf16 or fp16"),
        (("digits", "--mode", "auto"), "give module or layer"),
        (("digits", "--device", "cpu"), "give sim or an accelerator"),
        (("digits", "--device", "gpu"), "--device"),
        (("digits", "--seed", "x"), "--seed"),
    ],
)
def test_bad_input(refused, mine, tmp_path, arguments, says):
    (tmp_path / "broken_cases.py").write_text("1 / 0\n")
    importlib.invalidate_caches()
    assert says in refused("check", *arguments)


def test_an_entry_without_a_case(refused, monkeypatch):
    entry = PipelineEntry("bare", pipeline="pipelines.flux.pipeline_flux:OmniFluxPipeline")
    monkeypatch.setattr(pipelines, "registered", lambda: {"bare": entry})
    assert "has no case" in refused("check", "bare")


def test_without_a_compiler_it_says_so(refused, monkeypatch):
    monkeypatch.setattr(sim, "why_unavailable", lambda: "the software accelerator needs a compiler")
    assert "needs a compiler" in refused("check", "digits")


def test_a_folder_that_no_case_fits_names_why(refused, monkeypatch):
    from pipelines.digits.cases import CHECKPOINT
    from pipelines.flux.pipeline_flux import OmniFluxPipeline

    def check(self, *args, **kwargs):
        raise ValueError("no such call")

    monkeypatch.setattr(OmniFluxPipeline, "check_inputs", check)
    message = refused("check", str(CHECKPOINT))
    assert "flux: no such call" in message
    assert "MODULE:CASE" in message


# ---- interrupts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swallowed", [False, True])
def test_an_interrupt_keeps_what_was_done(cli, mine, monkeypatch, swallowed):
    """Also where the check that runs takes the interrupt for one that it has made itself."""
    from omni_offload.testing import runner

    run = runner.run_check

    def interrupting(check, bench):
        if check.__name__ == "check_discovery":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if not swallowed:
                    raise
        return run(check, bench)

    monkeypatch.setattr(runner, "run_check", interrupting)
    before = signal.getsignal(signal.SIGINT)
    status, out, _ = cli("check", mine("GOOD"), mine("WRONG"), "--json")
    assert status == 130
    assert signal.getsignal(signal.SIGINT) is before
    told = json.loads(out)
    assert told["interrupted"] is True
    (case,) = told["cases"]
    assert case["counts"]["PASSED"] == 2
    reasons = {result["reason"] for result in case["results"] if result["outcome"] == "NOT_RUN"}
    assert reasons == {"interrupted before it was done"}


# ---- terminals -----------------------------------------------------------------------------------------------------------------


def test_a_narrow_terminal_shows_everything_that_a_wide_one_does(cli, mine, monkeypatch):
    monkeypatch.setattr(app, "_console", lambda: Console(width=80))
    status, out, _ = cli("check", mine("WRONG"), *QUICK)
    assert status == 1
    assert max(map(len, out.splitlines()[:-2])) <= 80
    words = " ".join(out.split())
    for part in ("check_discovery", "FAILED", "forgotten", "rule and reason"):
        assert part in words


def test_a_terminal_shows_which_check_runs():
    from omni_offload.cli.cases import Subject

    console = Console(force_terminal=True, width=100)
    with console.capture() as shown:
        subject = Subject(target="digits", case=pipelines.registered()["digits"].load_cases()[0])
        run = checking._Run(
            subject=subject, dtype=None, mode=OffloadMode.MODULE, names=["check_plan"], device="sim:0", console=console, stopped=[]
        )
        sim.install()
        run.checked(exhaustive=False, seed=0)
    assert "digits: check_plan" in shown.get()


def test_a_terminal_has_colours_and_a_pipe_has_none(monkeypatch):
    from omni_offload.cli.verdict import CheckedCase, show_case

    results = (CheckResult(check="check_x", rule="A rule.", outcome=Outcome.FAILED, reason="why [bold]not[/]"),)
    checked = CheckedCase(target="x", dtype=None, report=CheckReport(case="x", device="sim:0", results=results), seconds=1.0)
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=100, color_system="standard" if terminal else None)
        with console.capture() as shown:
            show_case(checked, console)
        assert ("\x1b[" in shown.get()) is terminal
        assert "why [bold]not[/]" in shown.get()
