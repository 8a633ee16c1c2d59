"""Every missing wait is reported, by name and in any timing; the right program reports none."""

import pytest
import torch

from omni_offload.testing import sim

SIZE = 1 << 16
BYTES = 4 * SIZE


@pytest.fixture(params=["virtual", "threads"])
def mode(request, device):
    """Each rule holds in both modes; in threads mode copies are slow enough for wrong data to be seen."""
    sim.configure(mode=request.param, h2d_gbps=0.02, d2h_gbps=0.02)
    return request.param


def pinned(value=1.0):
    return torch.full((SIZE,), value).pin_memory()


def kinds():
    return [race.kind for race in sim.races()]


# ---- device memory -------------------------------------------------------------------------------------------------------


def test_read_before_the_copy_has_landed(device, mode):
    there, side = torch.empty(SIZE, device=device), torch.Stream(device)
    with side:
        there.copy_(pinned(), non_blocking=True)
    seen = there + 1
    (race,) = sim.races()
    assert (race.kind, race.first, race.second, race.device) == ("write-then-read", "H2D copy", "aten::add", 0)
    assert (race.first_on, race.second_on) == (f"sim:0 stream {side.stream_id}", "sim:0 default stream")
    assert (race.nbytes, race.start, race.end) == (BYTES, 0, BYTES)
    assert (
        str(race)
        == race.message
        == (
            f"write-then-read with no wait between, of the bytes [0, {BYTES}) of {BYTES} bytes of sim:0: "
            f"'H2D copy' on sim:0 stream {side.stream_id}, then 'aten::add' on sim:0 default stream"
        )
    )
    if mode == "threads":
        assert seen.cpu().isnan().all()


@pytest.mark.parametrize("wait", ["stream", "event", "host", "device"])
def test_any_wait_orders(device, mode, wait):
    there, side, done = torch.empty(SIZE, device=device), torch.Stream(device), torch.Event(device)
    with side:
        there.copy_(pinned(), non_blocking=True)
        done.record()
    if wait == "stream":
        torch.sim.current_stream().wait_stream(side)
    elif wait == "event":
        torch.sim.current_stream().wait_event(done)
    elif wait == "host":
        done.synchronize()
    else:
        torch.accelerator.synchronize()
    assert torch.equal((there + 1).cpu(), torch.full((SIZE,), 2.0))
    assert sim.races() == []


def test_event_recorded_too_early_orders_nothing(device, mode):
    there, side, done = torch.empty(SIZE, device=device), torch.Stream(device), torch.Event(device)
    with side:
        done.record()
        there.copy_(pinned(), non_blocking=True)
    torch.sim.current_stream().wait_event(done)
    there.add(1)
    assert kinds() == ["write-then-read"]


def test_waits_are_transitive(device, mode):
    there = torch.empty(SIZE, device=device)
    first, second = torch.Stream(device), torch.Stream(device)
    with first:
        there.copy_(pinned(), non_blocking=True)
    second.wait_stream(first)
    torch.sim.current_stream().wait_stream(second)
    there.add(1)
    assert sim.races() == []


def test_copy_over_what_is_still_read(device, mode):
    there, side = torch.ones(SIZE, device=device), torch.Stream(device)
    torch.accelerator.synchronize()
    source = pinned()
    there.sum()
    with side:
        there.copy_(source, non_blocking=True)
    assert kinds() == ["read-then-write"]


def test_two_writers(device, mode):
    there, side = torch.empty(SIZE, device=device), torch.Stream(device)
    with side:
        there.copy_(pinned(), non_blocking=True)
    there.zero_()
    assert kinds() == ["write-then-write"]


def test_two_readers_and_disjoint_bytes_are_free(device, mode):
    there, side = torch.ones(2, SIZE, device=device), torch.Stream(device)
    side.wait_stream(torch.sim.current_stream())
    with side:
        there[0].sum()
        there[0].copy_(pinned(), non_blocking=True)
    there[1].mul_(2)
    assert sim.races() == []


def test_race_raises_where_asked_and_names_both(device, mode):
    sim.configure(races="raise")
    there, side = torch.empty(SIZE, device=device), torch.Stream(device)
    with side:
        there.copy_(pinned(), non_blocking=True)
    with pytest.raises(RuntimeError, match=r"sim race: .*'H2D copy' on sim:0 stream .*'aten::add' on sim:0 default stream"):
        there.add(1)
    torch.accelerator.synchronize()
    there.add(1)


def test_checker_may_be_off(device, mode):
    sim.configure(races="off")
    there, side = torch.empty(SIZE, device=device), torch.Stream(device)
    with side:
        there.copy_(pinned(), non_blocking=True)
    there.add(1)
    assert sim.races() == []


def test_races_are_forgotten_on_request(device):
    test_two_writers(device, "virtual")
    sim.reset_races()
    assert sim.races() == []


def test_view_operators_touch_nothing(device, mode):
    there, side = torch.empty(SIZE, device=device), torch.Stream(device)
    with side:
        there.copy_(pinned(), non_blocking=True)
    there.view(2, -1).t()[1:].unfold(0, 2, 2).detach().expand(2, -1, -1, -1)
    assert sim.races() == []


# ---- memory that is freed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
def test_freed_while_another_stream_uses_it(device, mode, recorded):
    there, side = torch.empty(SIZE, device=device), torch.Stream(device)
    side.wait_stream(torch.sim.current_stream())
    with side:
        there.copy_(pinned(), non_blocking=True)
    if recorded:
        there.record_stream(side)
    del there
    torch.empty(1, device=device)
    assert kinds() == ([] if recorded else ["reuse-after-free"])
    if not recorded:
        assert "no record_stream before, no wait since" in sim.races()[0].message


def test_wait_before_the_next_allocation_is_enough(device, mode):
    there, side = torch.empty(SIZE, device=device), torch.Stream(device)
    side.wait_stream(torch.sim.current_stream())
    with side:
        there.copy_(pinned(), non_blocking=True)
    del there
    torch.sim.current_stream().wait_stream(side)
    torch.empty(1, device=device)
    assert sim.races() == []


def test_allocation_on_another_stream_does_not_reuse(device, mode):
    there, side, third = torch.empty(SIZE, device=device), torch.Stream(device), torch.Stream(device)
    side.wait_stream(torch.sim.current_stream())
    with side:
        there.copy_(pinned(), non_blocking=True)
    del there
    with third:
        torch.empty(1, device=device)
    assert sim.races() == []
    torch.accelerator.synchronize()


# ---- host memory ---------------------------------------------------------------------------------------------------------------


def test_host_reads_a_target_early(device, mode):
    source, target = torch.full((SIZE,), 7.0, device=device), pinned(0.0)
    target.copy_(source, non_blocking=True)
    with sim.watch_host():
        seen = target.clone()
    (race,) = sim.races()
    assert (race.kind, race.first, race.second, race.second_on, race.device) == (
        "write-then-read",
        "D2H copy",
        "aten::clone",
        "host",
        None,
    )
    if mode == "threads":
        assert not torch.equal(seen, torch.full((SIZE,), 7.0))
    torch.accelerator.synchronize()
    with sim.watch_host():
        assert torch.equal(target, torch.full((SIZE,), 7.0))
    assert len(sim.races()) == 1


def test_host_overwrites_a_source_early(device, mode):
    staging, there = pinned(1.0), torch.empty(SIZE, device=device)
    there.copy_(staging, non_blocking=True)
    with sim.watch_host():
        staging.fill_(9.0)
    assert kinds() == ["read-then-write"]
    if mode == "threads":
        torch.accelerator.synchronize()
        assert torch.equal(there.cpu(), torch.full((SIZE,), 9.0))


def test_host_may_do_all_that_is_ordered(device, mode):
    with sim.watch_host():
        staging, there = pinned(1.0), torch.empty(SIZE, device=device)
        there.copy_(staging, non_blocking=True)
        staging.sum()
        pageable = torch.ones(3)
        torch.cat([pageable, pageable], out=torch.empty(0))
        torch.accelerator.synchronize()
        staging.fill_(2.0)
        there.copy_(staging)
        staging.zero_()
    assert sim.races() == []


def test_unregistering_under_a_queued_copy(device, mode):
    host, there = torch.ones(SIZE), torch.empty(SIZE, device=device)
    torch.sim.host_register(host.data_ptr(), BYTES)
    there.copy_(host, non_blocking=True)
    torch.sim.host_unregister(host.data_ptr())
    assert kinds() == ["unregister-in-use"]
    assert torch.equal(there.cpu(), torch.ones(SIZE))


def test_freeing_pinned_memory_under_a_queued_copy_is_safe(device, mode):
    host, there = pinned(3.0), torch.empty(SIZE, device=device)
    there.copy_(host, non_blocking=True)
    del host
    assert torch.equal(there.cpu(), torch.full((SIZE,), 3.0))
    assert sim.races() == []


# ---- a whole program --------------------------------------------------------------------------------------------------------------


def ring(device, *, wait_ready=True, wait_free=True):
    """Stream six blocks through two slots and return the sum."""
    masters = [pinned(float(i)) for i in range(6)]
    slots, ready, free = [torch.empty(SIZE, device=device) for _ in "ab"], [None] * 2, [None] * 2
    copy, total = torch.Stream(device), torch.zeros((), device=device)
    copy.wait_stream(torch.sim.current_stream())
    for i, master in enumerate(masters):
        slot = i % 2
        with copy:
            if wait_free and free[slot]:
                copy.wait_event(free[slot])
            slots[slot].copy_(master, non_blocking=True)
            ready[slot] = copy.record_event()
        if wait_ready:
            torch.sim.current_stream().wait_event(ready[slot])
        total += slots[slot].sum()
        free[slot] = torch.sim.current_stream().record_event()
    return total.item()


def test_right_ring_has_no_race(device, mode):
    assert ring(device) == SIZE * 15
    assert sim.races() == []


def test_ring_without_a_wait_is_reported_at_every_block(device, mode):
    ring(device, wait_free=False)
    assert kinds() == ["read-then-write"] * 4
    sim.reset_races()
    ring(device, wait_ready=False)
    assert kinds().count("write-then-read") == 6


def test_messages_are_the_same_every_time(device):
    def messages():
        sim.reset_races()
        ring(device, wait_free=False)
        return [(race.kind, race.first, race.second, race.start, race.end) for race in sim.races()]

    assert messages() == messages()


def test_many_views_of_one_arena_stay_cheap(device):
    arena, side = torch.zeros(1 << 16, device=device), torch.Stream(device)
    side.wait_stream(torch.sim.current_stream())
    views = arena.split(16)
    for _ in range(2):
        with side:
            for view in views:
                view.add_(1)
        side.synchronize()
    assert sim.races() == []


def test_copies_between_devices_are_ordered_on_both_sides(device):
    """A copy to another device waits for the target's stream, and the target's stream for the copy, as on CUDA."""
    there = torch.full((1 << 16,), 3.0).to("sim:0").to("sim:1")
    assert torch.equal((there + 1).cpu(), torch.full((1 << 16,), 4.0))
    assert not sim.races()
