"""A rank fails at a step that all ranks do together: every other one ends with a named error, or rightly; nothing hangs, nothing is left.

Steps are all calls of the functions that ranks do together, found by tracing a run that goes well: the first and the middle call of each, in
enabling, in a call, and in disabling.
"""

import datetime as dt
import gc
import time
from pathlib import Path

import pytest
import torch
from faults import Steps, fail
from rank_threads import GATHER, Ranks, leftovers, makes, same

from omni_offload import OffloadStateError
from omni_offload.testing import sim

PHASES = ("enable", "call", "call again", "disable")
LIMIT = 1.5
#: Where nothing goes wrong, nobody is told to wait less: other processes may have the processors.
LONG = dt.timedelta(seconds=30)


@pytest.fixture(scope="module")
def make(kit):
    """Make the pipeline; every rank makes its own, with equal weights."""
    return makes(kit)


class Run:
    """Ranks that enable, call twice and disable, one of which fails at a step.

    Attributes:
        told: Per rank and phase, what it raised.
        steps: Per rank, its steps.
    """

    def __init__(self, make, ranks, x):
        self.make, self.ranks, self.x, self.limit = make, ranks, x, ranks.limit
        plain = make()
        self.want = plain(x)

    def __call__(self, at=None, bad=0):
        self.at, self.bad = at, bad
        self.told = [{} for _ in range(self.ranks.size)]
        self.steps = [Steps(at if rank == bad else None, fail) for rank in range(self.ranks.size)]
        self.ranks.renew()
        self.ranks.limit = LONG if at is None else self.limit
        start = time.monotonic()
        self.pipes = self.ranks.all(self._rank)
        self.seconds = time.monotonic() - start
        if all("enable" in told for told in self.told):
            self.ranks.limit = LONG
            self.ranks.all(self._again)
        del self.pipes
        return self

    def _again(self, rank, device):
        """What could not be enabled anywhere can be enabled again, with the same pipeline."""
        pipe = self.pipes[rank]
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            assert torch.equal(pipe(self.x).cpu(), self.want), self.at
        assert same(pipe, self.make()), self.at

    def _rank(self, rank, device):
        pipe, told, steps = self.make(), self.told[rank], self.steps[rank]
        actions = [
            lambda: pipe.enable_omni_offload("layer", device=device, **GATHER),
            *[lambda: pipe(self.x)] * 2,
            pipe.disable_omni_offload,
        ]
        for phase, action in zip(PHASES, actions, strict=True):
            made = None
            try:
                with steps.phase(phase):
                    made = action()
            except Exception as error:  # what else comes is the test's failure
                told[phase] = _chain(error)  # not the error, whose causes keep what was on the device
            if action is actions[1] and made is not None:
                assert torch.equal(made.cpu(), self.want), (phase, self.at)
            if "enable" in told:
                break
        lost = self._end(pipe, told)
        assert pipe.offload_backend is None
        assert leftovers(pipe) == []
        assert lost or same(pipe, self.make()), self.at
        assert not lost or rank == self.bad or "enable" not in told, self.at
        return pipe

    def _end(self, pipe, told):
        """Disable what is enabled still; whether weights are said to be lost."""
        errors = [told.get("disable", ""), told.get("enable", "")]
        for _ in range(2):
            try:
                pipe.disable_omni_offload()
            except OffloadStateError as error:
                errors.append(str(error))
        return any("hold no weights any more: load the" in error for error in errors)

    def check(self):
        """Who failed raised that; every other rank raised nothing but errors of ours, soon, or nothing went wrong for it."""
        phase = self.at[0]
        assert self.steps[self.bad].done, self.at
        assert self.seconds < 10 * self.limit.total_seconds(), (self.at, self.seconds)
        assert "told to" in self.told[self.bad].get(phase, ""), (self.at, self.told)
        for rank, told in enumerate(self.told):
            if rank != self.bad:
                assert all(error.startswith("OffloadStateError(") for error in told.values()), (self.at, told)
                assert phase not in PHASES[:2] or not told or min(map(PHASES.index, told)) <= PHASES.index(phase) + 1, (self.at, told)
        if phase == "enable":
            assert all(told for told in self.told), (self.at, self.told)  # none goes on as if all were there


def _chain(error):
    """The text of an error, of what is noted on it, and of those that led to it."""
    if error is None:
        return ""
    return "\n".join([repr(error), *getattr(error, "__notes__", ()), _chain(error.__cause__ or error.__context__)])


@pytest.fixture
def run(make, device, monkeypatch, x, request):
    """A run of ranks, as many as asked for."""
    size = getattr(request, "param", 2)
    sim.configure(devices=size)
    ranks = Ranks(size, monkeypatch)
    ranks.limit = dt.timedelta(seconds=LIMIT if size == 2 else 3 * LIMIT)  # they share the processors
    before = {*Path("/dev/shm").iterdir()}
    yield Run(make, ranks, x)
    gc.collect()
    assert {*Path("/dev/shm").iterdir()} <= before


def steps_of(run):
    """The steps of a run that goes well, in their order; the same on all ranks."""
    run()  # what is made once a process is there afterwards
    run()
    assert run.told == [{}] * run.ranks.size
    found = [[*steps.steps()] for steps in run.steps]
    assert all(one == found[0] for one in found)
    return [step for step in found[0] if step[0] != "call again"]


def check_each(run, steps, bad):
    for step in steps:
        run(step, bad).check()
        gc.collect()
        assert (sim.allocated(), sim.pinned_bytes(), sim.races()) == (0, 0, []), step


@pytest.mark.parametrize("bad", [0, 1])
def test_some_steps(run, bad):
    """Some of the steps, others for each rank."""
    steps = steps_of(run)
    assert len(steps) > 150
    check_each(run, [("enable", "ShardedBlock.commit", 2), *steps[17 * (bad + 1) :: 60]], bad)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("phase", ["enable", "call", "disable"])
@pytest.mark.parametrize("bad", [0, 1])
def test_every_step(run, bad, phase):
    """The first rank and the last, at every step."""
    check_each(run, [step for step in steps_of(run) if step[0] == phase], bad)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", [4], indirect=True)
@pytest.mark.parametrize("bad", [0, 3])
def test_steps_of_four_ranks(run, bad):
    """The first rank of four and the last, at every fifth step."""
    check_each(run, steps_of(run)[bad::5], bad)
