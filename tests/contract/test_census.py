"""How many checks there are, and how many each registered pipeline runs: no check goes missing unseen."""

import inspect

import pytest

import pipelines
from omni_offload.testing import Bench, all_checks, check_pipeline
from omni_offload.testing.report import Outcome
from omni_offload.testing.runner import rule_of

CHECKS = 54


def test_number_of_checks():
    """The list holds so many checks, each once."""
    assert len(all_checks()) == len(set(all_checks())) == len({check.__name__ for check in all_checks()}) == CHECKS


def test_form_of_checks():
    """A check is a function named check_*, takes the bench, and its first line is its rule."""
    for check in all_checks():
        assert check.__name__.startswith("check_")
        assert [p.annotation for p in inspect.signature(check).parameters.values()] == [Bench]
        assert rule_of(check).endswith("."), check.__name__


def test_no_check_is_left_out_of_the_list():
    """Every function named check_* in the checks' modules is in the list."""
    from omni_offload.testing import checks

    modules = {inspect.getmodule(check) for check in all_checks()}
    found = {value for module in modules for name, value in vars(module).items() if name.startswith("check_") and callable(value)}
    assert found == set(checks.CHECKS)


@pytest.mark.parametrize("name", pipelines.registered())
def test_every_check_is_reported(name):
    """A report has one line for every check of the list, also where it was not asked for."""
    case = pipelines.registered()[name].load_cases()[0]
    report = check_pipeline(case, checks=["check_protocols"])
    assert [result.check for result in report.results] == [check.__name__ for check in all_checks()]
    assert report.named(Outcome.PASSED) == ("check_protocols",)
    assert len(report.named(Outcome.NOT_RUN)) == CHECKS - 1
