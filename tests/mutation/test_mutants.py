"""The table of mutants fits the source, and the runner tells a mutant that is killed from one that is not."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest
import run_mutants
from mutants import CONTROLS, MUTANTS, Mutant

FOLDER = Path(__file__).parent
#: Each part of the core.
PACKAGES = (
    "accelerator",
    "backends",
    "cleanup.py",
    "config",
    "discovery",
    "factory.py",
    "hooks.py",
    "mixins",
    "plan",
    "residency",
    "trace",
)


def test_every_mutant_applies_to_the_source_as_it_is():
    assert run_mutants.source_problems((*MUTANTS, *CONTROLS)) == []


def test_every_part_of_the_core_has_mutants_with_a_fault_and_a_named_killer():
    assert len(MUTANTS) >= 45
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert [mutant.name for mutant in MUTANTS if not mutant.fault or not mutant.killers] == []
    assert {mutant.file.partition("/")[0] for mutant in MUTANTS} >= set(PACKAGES)


def test_a_fragment_that_is_gone_or_stands_twice_or_breaks_the_syntax_is_named():
    there = Mutant("there", "cleanup.py", "return first", "return first", "nothing", ())
    wrong = [
        attrs.evolve(there, name="gone", fragment="no such text"),
        attrs.evolve(there, name="twice", fragment="step"),
        attrs.evolve(there, name="syntax", replacement="return ("),
        attrs.evolve(there, name="file", file="no_such_file.py"),
    ]
    assert [problem.partition(":")[0] for problem in run_mutants.source_problems([there, *wrong])] == [mutant.name for mutant in wrong]


def test_only_the_lines_that_change_count_as_reached(tmp_path):
    (tmp_path / "file.py").write_text("a = 1\nb = 2\nc = 3\nd = 4\n", encoding="utf-8")
    mutant = Mutant("name", "file.py", "b = 2\nc = 3\nd = 4", "b = 2\nc = 30\nd = 4", "fault", ())
    assert list(run_mutants.changed_lines(mutant, tmp_path)) == [3]
    assert list(run_mutants.changed_lines(attrs.evolve(mutant, replacement="d = 4"), tmp_path)) == [2, 3]
    assert run_mutants.mutated(mutant, tmp_path) == "a = 1\nb = 2\nc = 30\nd = 4\n"


def test_a_mutant_without_end_is_killed_by_the_time_limit_and_says_so(tmp_path):
    result = run_mutants.judge(MUTANTS[0], tmp_path, 12.0, late=True)
    assert (result.status, result.killer) == ("TIMEOUT", "no end after 12 s")


@pytest.mark.parametrize("result", [{"origin": "/elsewhere/omni_offload/__init__.py"}, {"code": 4, "failed": []}, None], ids=str)
def test_a_run_that_proves_nothing_is_an_error(tmp_path, result):
    (tmp_path / "log.txt").write_text("the log", encoding="utf-8")
    if result is not None:
        whole = {"code": 0, "passed": [], "failed": [], "origin": str(tmp_path / "omni_offload" / "__init__.py"), **result}
        (tmp_path / "result.json").write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(run_mutants.StaleError):
        run_mutants.outcome(tmp_path)


def test_the_runner_tells_what_is_killed_from_what_is_not():
    """One is killed by a named test, a harmless one survives, one is noticed by another test only, one is not reached; the run fails."""
    command = [sys.executable, str(FOLDER / "run_mutants.py"), "--json", *(mutant.name for mutant in CONTROLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 1, done.stderr[-2000:]
    found = {result["name"]: (result["status"], result["killer"].partition("[")[0]) for result in json.loads(done.stdout)}
    assert found == {
        "control-killed": ("KILLED", "tests/test_cleanup.py::test_every_step_runs_and_the_first_failure_is_returned"),
        "control-harmless": ("SURVIVED", ""),
        "control-killed-by-another": ("OTHER", "tests/test_cleanup.py::test_every_step_runs_and_the_first_failure_is_returned"),
        "control-not-reached": ("NOT REACHED", ""),
    }
