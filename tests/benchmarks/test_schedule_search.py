"""The exhaustive search finds the schedules that can be worked out by hand."""

import itertools

import pytest
from schedule_search import Use, best_schedule

SIZES = {"a": 1, "b": 2, "c": 4}
LOADS = {"a": 1.0, "b": 2.0, "c": 4.0}


def _seconds(uses, budget=None, sizes=SIZES, loads=LOADS):
    return best_schedule([Use(*use) for use in uses], sizes, loads, budget=budget).seconds


def test_one_at_a_time_is_serial():
    """Without a budget each load waits for the use before it: loads and uses add up."""
    assert _seconds([("a", 1.0), ("b", 3.0), ("c", 5.0)]) == 1 + 1 + 2 + 3 + 4 + 5


def test_everything_fits():
    """All loads follow one another at once; each use starts when its load has landed and the use before it has ended."""
    # a: 1..2, b lands at 3 and runs 3..6, c lands at 7 and runs 7..12
    assert _seconds([("a", 1.0), ("b", 3.0), ("c", 5.0)], budget=7) == 12


def test_a_load_waits_for_memory():
    """What does not fit beside the present component is loaded when the one before it has gone."""
    # b runs 3..6; c fits beside b once a has gone, at 4 (lands at 8); with room for c alone it starts at 6
    assert _seconds([("a", 3.0), ("b", 2.0), ("c", 1.0)], budget=6) == 9
    assert _seconds([("a", 3.0), ("b", 2.0), ("c", 1.0)], budget=4) == 4 + 2 + 4 + 1


def test_what_is_used_again_stays_where_that_is_better():
    """A component that is used twice is kept if the budget has room for it, else it is loaded twice."""
    uses = [("a", 1.0), ("b", 1.0), ("a", 1.0)]
    assert _seconds(uses, budget=3) == 5  # a: 1..2, b lands at 3: 3..4, a again: 4..5
    assert _seconds(uses) == 1 + 1 + 2 + 1 + 1 + 1


def test_keeping_may_be_worse_than_loading_again():
    """Where what is kept would hold up a larger load, the search lets it go."""
    uses = [("a", 0.0), ("c", 10.0), ("b", 0.0), ("a", 0.0)]
    best = best_schedule([Use(*use) for use in uses], SIZES, LOADS, budget=6)
    assert [stay.component for stay in best.loads].count("a") == 2  # b beside c (6) needs a's place
    assert best.seconds == 16  # a 1, c 5..15, b landed meanwhile, a loaded again 15..16


def test_the_budget_has_to_hold_the_largest():
    """No schedule is an error."""
    with pytest.raises(ValueError, match="no schedule fits into 3 bytes"):
        _seconds([("c", 1.0)], budget=3)


@pytest.mark.parametrize("names", list(itertools.product("ab", repeat=4)), ids="".join)
def test_a_larger_budget_is_never_slower(names):
    """More memory cannot hurt, and no schedule beats the bounds of compute and of one load each."""
    uses = [(name, 1.5) for name in names]
    found = [_seconds(uses, budget=budget) for budget in (2, 3, 100)]
    assert found == sorted(found, reverse=True)
    first = LOADS[names[0]]
    assert found[-1] >= max(first + 1.5 * len(names), sum(LOADS[name] for name in set(names)))
