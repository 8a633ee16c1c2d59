"""A rank that is a process fails, or is killed, at a step that all do together: every other one ends with a named error, and leaves nothing.

Steps are all calls of the functions that ranks do together, found by tracing a run that goes well.
"""

import concurrent.futures
import itertools
import tempfile
from pathlib import Path

import pytest
import rank_processes
from rank_processes import LIMIT, PHASES, run_ranks


@pytest.fixture(autouse=True)
def nothing_stays():
    """No shared memory stays."""
    before = {*Path("/dev/shm").iterdir()}
    yield
    assert {*Path("/dev/shm").iterdir()} <= before


def run(size, at=None, **keys):
    with tempfile.TemporaryDirectory() as folder:
        told = run_ranks(size, folder, at, **keys)
        assert {path.name for path in Path(folder).iterdir()} <= {"store"}
    return told


def steps_of(size):
    told = run(size)
    for rank in told:
        assert rank["told"] == {}
        assert rank["left"] == {"device": 0, "pinned": 0, "races": 0, "hooks": 0}
        assert rank["steps"] == told[0]["steps"]
    return [step for step in told[0]["steps"] if step[0] != "call again"]


def check(size, at, bad, fault):
    """Every other rank that is told of it names it within the limit; all that are left give up everything, and say what is lost."""
    told = run(size, at, bad=bad, fault=fault)
    where = (at, bad, fault, told)
    assert (told[bad] is None) == (fault == "is killed"), where
    if told[bad] is not None:
        assert told[bad]["done"], where
        assert "told to" in told[bad]["told"].get(at[0], ""), where
    for rank in (rank for index, rank in enumerate(told) if index != bad):
        assert all(text.startswith("OffloadStateError") for phase, text in rank["told"].items() if phase in PHASES), where
        assert all(seconds < 3 * LIMIT for seconds in rank["seconds"].values()), where
        assert rank["told"] or at[0] == "disable" or fault == "raises", where
        assert not rank["told"] or PHASES.index(min(rank["told"], key=[*PHASES, "disable again"].index)) <= PHASES.index(at[0]) + 1, where
    for rank in filter(None, told):
        assert rank["left"] == {"device": 0, "pinned": 0, "races": 0, "hooks": 0}, where
        assert rank["whole"], where


def check_all(size, cases):
    """Check many cases, some at once: ranks wait most of the time."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(check, size, *case) for case in cases]:
            done.result()


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_some_kills():
    """Killed while it enables, in the middle of a gather, and while it disables: the last rank of two."""
    steps = steps_of(2)
    named = [("enable", "ShardedBlock.prepare"), ("call", "Accelerator.gather"), ("disable", "Gathering.collect")]
    cases = [next(step for step in reversed(steps) if step[:2] == one) for one in named]
    check_all(2, [(case, 1, "is killed") for case in cases])


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("phase", ["enable", "call", "disable"])
@pytest.mark.parametrize("fault", rank_processes.FAULTS)
def test_two_ranks(phase, fault):
    """Each of two ranks, at every step."""
    check_all(2, itertools.product([step for step in steps_of(2) if step[0] == phase], [0, 1], [fault]))


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("fault", rank_processes.FAULTS)
def test_four_ranks(fault):
    """The first rank of four and the last, at every sixth step."""
    steps = steps_of(4)
    check_all(4, [(step, bad, fault) for bad in (0, 3) for step in steps[bad::6]])
