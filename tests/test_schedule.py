"""The arithmetic of streaming: bounds, placements and step times."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_offload.schedule import (
    BlockCost,
    assumed_costs,
    better_residents,
    bound,
    choose_residents,
    least_bytes,
    spread,
    step_time,
)

RATIOS = (0.25, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0)


def _equal(blocks, ratio):
    return [BlockCost(1.0, ratio, 10)] * blocks


@pytest.mark.parametrize("resident", [0, 10, 20, 30])
@pytest.mark.parametrize("ratio", RATIOS)
def test_spread_residents_reach_the_bound(ratio, resident):
    """With three slots, 40 equal blocks take what copies or computation alone take."""
    costs = _equal(40, ratio)
    found = choose_residents(costs, 3, number=resident)
    assert len(found.residents) == resident
    assert step_time(costs, found.residents, 3) == pytest.approx(max(40.0, (40 - resident) * ratio), rel=1e-3)


@pytest.mark.parametrize("resident", [10, 13, 20, 30])
@pytest.mark.parametrize("ratio", RATIOS)
def test_residents_of_equal_blocks_are_spread_evenly(ratio, resident):
    """Between two residents, and around the end, lie as many streamed blocks as between any others, or one more."""
    found = choose_residents(_equal(40, ratio), 3, number=resident).residents
    gaps = {(after - before) % 40 for before, after in zip(found, (*found[1:], found[0]), strict=True)}
    assert max(gaps) - min(gaps) <= 1


def test_leading_residents_do_not():
    """Residents at the start leave the copy engine idle: half of 40 at t = 2 c take 1.4 times the bound."""
    costs = _equal(40, 2.0)
    found = choose_residents(costs, 3, number=20, leading=True)
    assert found.residents == tuple(range(20))
    assert step_time(costs, found.residents, 3) / bound(costs, found.residents) == pytest.approx(1.4, abs=0.01)


def test_two_slots_can_be_over_the_bound():
    """Where blocks do not divide evenly among residents, two slots lose what three do not."""
    costs = _equal(40, 1.3)
    residents = spread([10] * 40, 9)
    assert step_time(costs, residents, 2) > 1.08 * bound(costs, residents)
    assert step_time(costs, residents, 3) <= 1.001 * bound(costs, residents)


def test_step_time_by_hand():
    """Two streamed blocks over one slot: nothing overlaps but the engine waits for the slot."""
    costs = [BlockCost(1.0, 2.0, 1), BlockCost(3.0, 4.0, 1)]
    assert step_time(costs, (), 1) == 10.0
    assert step_time(costs, (), 2) == 7.0  # the second copy waits for its slot
    assert step_time(costs, (), 3) == 6.0  # copies alone
    assert step_time(costs, (0,), 1) == 7.0  # (4 + 3), while block 0 runs within the copy
    assert step_time(costs, (0, 1), 0) == 4.0
    with pytest.raises(ValueError, match="2 blocks stream, and slots is 0"):
        step_time(costs, (), 0)


def test_least_bytes():
    """The least is the slots of the largest block, or that block resident and smaller slots, whichever is less."""
    assert least_bytes([BlockCost(1, 1, size) for size in (10, 10, 10, 10)], 3) == 30
    assert least_bytes([BlockCost(1, 1, size) for size in (100, 10, 10, 10, 10)], 3) == 130
    assert least_bytes([BlockCost(1, 1, size) for size in (10, 20)], 3) == 30
    assert least_bytes([], 3) == 0


def test_too_few_bytes():
    """What does not fit is an error that says how much would."""
    costs = _equal(5, 1.0)
    with pytest.raises(ValueError, match="at least 30 bytes, and 29 are there"):
        choose_residents(costs, 3, nbytes=29)
    with pytest.raises(ValueError, match="4 resident blocks and 1 slots take 50 bytes, and 49 are there"):
        choose_residents(costs, 3, number=4, nbytes=49)


def test_nothing_asked_means_nothing_resident():
    """Without a number and without a budget everything streams."""
    found = choose_residents(_equal(5, 1.0), 3)
    assert (found.residents, found.slots, found.slot_bytes, found.device_bytes) == ((), 3, 10, 30)


def test_large_blocks_stay_where_that_makes_slots_small():
    """One block far larger than the others is kept, so that slots are small, and the room goes to residents."""
    costs = [BlockCost(1, size, size) for size in (10, 10, 10, 100, 10, 10, 10)]
    found = choose_residents(costs, 3, nbytes=140)
    assert 3 in found.residents
    assert found.slot_bytes == 10
    assert found.device_bytes <= 140


@pytest.mark.parametrize("proportional", [False, True], ids=["alike", "by bytes"])
def test_unequal_blocks(proportional):
    """Nineteen large and 38 small blocks, as Flux has, that compute alike, or by their bytes: no random placement is 2 % faster."""
    sizes, chance = [144] * 19 + [60] * 38, random.Random(0)
    for budget in range(440, sum(sizes), 900):
        costs = BlockCost.balanced(sizes, sum(sizes) - budget)
        if proportional:
            costs = [BlockCost(size * (1 - budget / sum(sizes)), size, size) for size in sizes]
        found = choose_residents(costs, 3, nbytes=budget)
        assert found.device_bytes <= budget
        seconds = step_time(costs, found.residents, found.slots)
        for _ in range(100):
            kept = set()
            for index in chance.sample(range(len(sizes)), len(sizes)):
                if _bytes(sizes, {*kept, index}, 3) <= budget:
                    kept.add(index)
            if _bytes(sizes, kept, 3) <= budget:
                assert seconds <= 1.02 * step_time(costs, kept, 3)


def test_copies_keep_pace_with_computation():
    """Blocks that compute alike: where they are large, more of them stay, so that the copies of each part fit beside its computation."""
    sizes = [100] * 20 + [50] * 20
    costs = [BlockCost(1.0, size / 30, size) for size in sizes]
    found = choose_residents(costs, 3, nbytes=1900)
    assert step_time(costs, found.residents, found.slots) <= 1.03 * bound(costs, found.residents)
    assert sum(index < 20 for index in found.residents) > 1.5 * sum(index >= 20 for index in found.residents)


@pytest.mark.parametrize(
    ("keys", "streamed"), [({}, 400), ({"number": 10}, 300), ({"number": 50}, 0), ({"nbytes": 130}, 300), ({"nbytes": 29}, 400)]
)
def test_assumed_costs(keys, streamed):
    """Blocks of which only the sizes are known are taken to compute alike, and together as long as what streams is copied."""
    costs = assumed_costs([10] * 40, 3, **keys)
    assert [(cost.copy, cost.nbytes) for cost in costs] == [(10, 10)] * 40
    assert {cost.compute for cost in costs} == {streamed / 40}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_budgets_hold(sizes, data):
    """Any budget from the least on is kept, spread or leading, and everything fits at last."""
    slots = data.draw(st.integers(2, 4))
    costs = BlockCost.balanced(sizes, sum(sizes))
    budget = data.draw(st.integers(least_bytes(costs, slots), sum(sizes) + 60))
    for leading in (False, True):
        found = choose_residents(costs, slots, nbytes=budget, leading=leading)
        assert found.device_bytes <= budget
        streamed = [size for index, size in enumerate(sizes) if index not in found.residents]
        assert found.slot_bytes == max(streamed, default=0)
        assert found.slots == min(slots, len(streamed))
        if budget >= sum(sizes):
            assert not streamed


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_spread_takes_the_number(sizes, data):
    """So many residents as asked, each once, in order."""
    number = data.draw(st.integers(0, len(sizes)))
    chosen = spread(sizes, number)
    assert len(chosen) == number
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(range(len(sizes)))


@pytest.mark.parametrize("budget", [30, 45, 60, 75])
def test_near_the_best_of_all_placements(budget):
    """Six unequal blocks: within 2 % of the best of all placements that fit, found by trying them all."""
    sizes = [9, 15, 12, 6, 15, 9]
    costs = BlockCost.balanced(sizes, max(sum(sizes) - budget, 0))
    if budget < least_bytes(costs, 2):
        with pytest.raises(ValueError, match="at least"):
            choose_residents(costs, 2, nbytes=budget)
        return
    best = min(
        step_time(costs, kept, 2)
        for count in range(len(sizes) + 1)
        for kept in itertools.combinations(range(len(sizes)), count)
        if _bytes(sizes, kept, 2) <= budget
    )
    found = choose_residents(costs, 2, nbytes=budget)
    assert step_time(costs, found.residents, max(found.slots, 1)) <= 1.02 * best


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_a_unet_whose_computations_are_known(ratio, share):
    """The levels of a UNet, which compute and weigh very differently: as fast as the best of all placements, known costs given."""
    sizes = [42, 146, 555, 247, 385, 643, 1024, 283, 75]
    computes = [136, 85, 79, 9, 15, 32, 189, 208, 246]
    costs = [BlockCost(compute / 1000, ratio * size / sum(sizes), size) for size, compute in zip(sizes, computes, strict=True)]
    least = least_bytes(costs, 3)
    budget = least + round(share * (sum(sizes) - least))
    found = choose_residents(costs, 3, nbytes=budget)
    assert found.device_bytes <= budget
    every = itertools.chain.from_iterable(itertools.combinations(range(9), count) for count in range(10))
    best = min(step_time(costs, kept, 3) for kept in every if _bytes(sizes, kept, 3) <= budget)
    assert step_time(costs, found.residents, 3) <= 1.005 * best


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=7), st.data())
def test_a_number_that_fits_in_any_way_is_found(sizes, data):
    """So many residents are refused only where no choice of so many is within the bytes."""
    number = data.draw(st.integers(0, len(sizes)))
    costs = BlockCost.balanced(sizes, sum(sizes))
    least = min(_bytes(sizes, kept, 3) for kept in itertools.combinations(range(len(sizes)), number))
    found = choose_residents(costs, 3, number=number, nbytes=least)
    assert (len(found.residents), found.device_bytes) == (number, least)
    if least:
        with pytest.raises(ValueError, match=f"{number} resident blocks"):
            choose_residents(costs, 3, number=number, nbytes=least - 1)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_others_are_no_worse_and_take_no_more(seed, fill):
    """Residents chosen anew by other times fit where the present ones are, also where as many that are spread would not."""
    draw = random.Random(seed)
    sizes = [draw.choice([1, 2, 4, 8, 16]) for _ in range(draw.randint(5, 16))]
    number = draw.randint(1, len(sizes) - 2)
    present = choose_residents(assumed_costs(sizes, 3, number=number), 3, number=number)
    costs = [BlockCost(draw.uniform(0.5, 1.5) * 4, float(size), size) for size in sizes]
    found = better_residents(costs, 3, present, nbytes=None, fill=fill, steps=30)
    assert found.device_bytes <= present.device_bytes
    assert fill or len(found.residents) == number
    assert step_time(costs, found.residents, 3) <= step_time(costs, present.residents, 3)


def _bytes(sizes, kept, slots):
    streamed = [size for index, size in enumerate(sizes) if index not in kept]
    return sum(sizes[index] for index in kept) + min(slots, len(streamed)) * max(streamed, default=0)
