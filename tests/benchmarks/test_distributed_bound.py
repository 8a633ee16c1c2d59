"""Gathered blocks beside their bound: the benchmark's measures and its requirements, on a sample."""

import attrs
import pytest
from distributed_bound import (
    LOADS,
    RATIOS,
    SHARES,
    SIZES,
    Cell,
    Crossing,
    Ranks,
    measure_cell,
    measure_chunks,
    measure_crossing,
    measure_ranks,
    report,
)
from distributed_bound_drawing import draw

from omni_offload.testing import sim


@pytest.fixture(autouse=True)
def _races():
    yield
    sim.reset_races()


@pytest.mark.parametrize(("ranks", "ratio", "load", "share"), [(2, 1.0, 1.0, 0.0), (4, 0.5, 2.0, 0.5)])
def test_cells(ranks, ratio, load, share):
    """At the bound, with what launches and gathers cost within 5 %; with two slots and in one piece as far from it as was said."""
    found = measure_cell(ranks, ratio, load, share)
    assert not found.problems()
    assert found.bound == pytest.approx(max(1.0, (1 - share) * load) * 0.4)
    assert found.clean == pytest.approx(1.0, abs=1e-3)
    assert found.two == pytest.approx({2: (1 + 0.5 / 8, 1.5), 4: (1.0, 1.0)}[ranks], abs=2e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("ranks", SIZES)
def test_every_cell(ranks, ratio, load, share):
    """The whole grid."""
    assert not measure_cell(ranks, ratio, load, share).problems()


def test_chunks():
    """With two slots a block in n chunks takes half a block's time over n more, as what is not overlapped is shared by two slots."""
    for pieces in (1, 4):
        assert measure_chunks(4, pieces).steps[2, "clean"] == pytest.approx(1 + 0.5 / pieces, abs=2e-3)


def test_the_crossing_point(tmp_path):
    """All-gather is as fast as rank-local streaming where the peers' link is (W - 1) / W as fast as the host's; the drawing shows it."""
    found = measure_crossing(2, ratios=(0.25, 2.0))
    assert not found.problems()
    assert found.steps == pytest.approx({0.25: 4.0, 2.0: 1.0}, rel=1e-3)
    assert found.local == pytest.approx(2.0)
    draw(tmp_path / "crossing.svg", [found])
    assert "all-gather, 2 ranks" in (tmp_path / "crossing.svg").read_text()
    assert "| 2 | 0.25 | 4.0000 | 2.0000 | rank-local |" in report([], [], [found], [])


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_real_processes():
    """Outputs are a resident run's, and steps those of a rank that is alone."""
    assert not measure_ranks(2).problems()


def test_a_requirement_that_does_not_hold_is_named():
    """Each figure over its limit is a problem of its own, and so is a step that is too short to be one."""
    good = {"ranks": 2, "ratio": 1.0, "load": 1.0, "share": 0.0, "bound": 0.4, "unchunked": 1.5, "two": (1.5, 1.5)}
    cell = Cell(**good, clean=1.0, costly=1.05, races=0)
    assert not cell.problems()
    for name, value in {"clean": 1.051, "costly": 0.98, "races": 1}.items():
        assert len(attrs.evolve(cell, **{name: value}).problems()) == 1
    crossing = Crossing(ranks=2, steps={}, local=2.0, expected=0.5, found=0.509)
    assert not crossing.problems()
    assert len(attrs.evolve(crossing, found=0.511).problems()) == 1
    processes = Ranks(size=2, steps=[[1.0], [1.0]], alone=1.0, races=0)
    assert not processes.problems()
    assert len(attrs.evolve(processes, steps=[[1.0], [1.0000001]]).problems()) == 1
    assert len(attrs.evolve(processes, races=1).problems()) == 1
