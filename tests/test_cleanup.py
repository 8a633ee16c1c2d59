"""Cleanup that finishes."""

import logging
import weakref

import pytest

from omni_offload.cleanup import run_cleanup_steps


def _raising(error):
    def step():
        raise error

    return step


def test_without_steps_there_is_no_failure():
    assert run_cleanup_steps([]) is None


def test_steps_run_in_order_and_success_returns_none():
    ran = []
    assert run_cleanup_steps([("a", lambda: ran.append("a")), ("b", lambda: ran.append("b"))]) is None
    assert ran == ["a", "b"]


@pytest.mark.parametrize("first", [ValueError("one"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_every_step_runs_and_the_first_failure_is_returned(first):
    ran = []
    steps = [
        ("breaks", _raising(first)),
        ("works", lambda: ran.append("works")),
        ("breaks too", _raising(RuntimeError("two"))),
        ("works too", lambda: ran.append("works too")),
    ]
    assert run_cleanup_steps(iter(steps)) is first
    assert ran == ["works", "works too"]


def test_later_failures_become_notes_of_the_first():
    first = ValueError("one")
    run_cleanup_steps([("a", _raising(first)), ("b", _raising(RuntimeError("two"))), ("c", _raising(KeyboardInterrupt()))])
    assert first.__notes__ == ["cleanup step 'b' failed too: RuntimeError('two')", "cleanup step 'c' failed too: KeyboardInterrupt()"]


def test_an_interrupt_after_a_failure_is_not_lost():
    error = run_cleanup_steps([("a", _raising(ValueError("one"))), ("b", _raising(KeyboardInterrupt()))])
    assert isinstance(error, ValueError)
    assert "KeyboardInterrupt" in error.__notes__[0]


def test_the_same_error_twice_is_not_its_own_note():
    error = ValueError("one")
    assert run_cleanup_steps([("a", _raising(error)), ("b", _raising(error))]) is error
    assert not hasattr(error, "__notes__")


def test_each_failure_is_logged_by_the_name_of_its_step(caplog):
    with caplog.at_level(logging.WARNING, logger="omni_offload.cleanup"):
        run_cleanup_steps([("free slots", _raising(ValueError("one"))), ("remove hooks", _raising(ValueError("two")))])
    assert [record.getMessage() for record in caplog.records] == [
        "cleanup step 'free slots' failed: ValueError('one')",
        "cleanup step 'remove hooks' failed: ValueError('two')",
    ]


def test_the_error_keeps_nothing_alive_that_the_failed_step_held():
    class Held:
        pass

    held = []

    def step():
        here = Held()
        held.append(weakref.ref(here))
        raise ValueError("one")

    error = run_cleanup_steps([("a", step)])
    assert isinstance(error, ValueError)
    assert held[0]() is None
