"""All mutants of the core: one deliberate fault each, and the tests that must notice it.

A mutant whose fragment has gone from the source is adapted, not dropped: the fault that it stands for can still be made.
"""

from mutant import Mutant
from mutants_backends import BACKENDS
from mutants_layers import LAYERS
from mutants_mapped import MAPPED
from mutants_owners import OWNERS
from mutants_ranks import RANKS
from mutants_residency import RESIDENCY
from mutants_selection import SELECTION
from mutants_trace import TRACE

__all__ = ["CONTROLS", "MUTANTS", "Mutant"]

MUTANTS = (*RESIDENCY, *BACKENDS, *LAYERS, *MAPPED, *OWNERS, *RANKS, *SELECTION, *TRACE)

_STOPS = (
    "cleanup.py",
    "            if first is None:\n                first = error\n",
    "            if first is None:\n                return error\n",
)
_EVERY_STEP = "tests/test_cleanup.py::test_every_step_runs_and_the_first_failure_is_returned"
#: Not part of a run of all: they show that the runner tells a mutant that is killed from one that is not.
CONTROLS = (
    Mutant("control-killed", *_STOPS, "the steps behind a failure do not run", (_EVERY_STEP,)),
    Mutant("control-harmless", "cleanup.py", "elif error is not first:", "elif not (error is first):", "none", (_EVERY_STEP,)),
    Mutant(
        "control-killed-by-another",
        *_STOPS,
        "the steps behind a failure do not run",
        ("tests/test_cleanup.py::test_the_error_keeps_nothing_alive_that_the_failed_step_held",),
    ),
    Mutant(
        "control-not-reached",
        *_STOPS,
        "the steps behind a failure do not run",
        ("tests/test_cleanup.py::test_steps_run_in_order_and_success_returns_none",),
    ),
)
