"""Errors that steps of a clean-up left: which to raise, and without a cycle that would keep device memory alive."""

import functools
from collections.abc import Callable, Sequence

from omni_offload.cleanup import run_cleanup_steps

__all__ = ["first_error", "raise_error", "run_repeatable_steps"]


def run_repeatable_steps(steps: Sequence[tuple[str, Callable[[], None]]]) -> BaseException | None:
    """Run clean-up steps that are idempotent, and all of them once more where an interrupt cut one short; return the first failure."""
    error = run_cleanup_steps(steps)
    if error is not None and not isinstance(error, Exception):
        run_cleanup_steps(steps)
    return error


def first_error(*errors: BaseException | None) -> BaseException | None:
    """Return the first of some errors, with the others as notes."""
    return run_cleanup_steps((type(error).__name__, functools.partial(raise_error, error)) for error in errors if error is not None)


def raise_error(error: BaseException | None) -> None:
    """Raise an error, if there is one. Callers keep it in no variable of theirs: their frame is part of its traceback."""
    try:
        if error is not None:
            raise error
    finally:
        del error
