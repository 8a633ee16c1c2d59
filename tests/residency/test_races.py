"""Every wait that must be there is there, none blocks the host, and nothing is allocated in a steady state."""

import gc

import pytest
import torch

from omni_offload import ModuleResidency
from omni_offload.accelerator import Accelerator
from omni_offload.residency.device import DeviceBuffer
from omni_offload.testing import sim


@pytest.fixture(params=["threads", "virtual"])
def timing(request, device):
    """Throttled copies, in both modes; in virtual time a race raises where it happens."""
    sim.configure(mode=request.param, races="raise" if request.param == "virtual" else "record", h2d_gbps=1e-3, poison=True)
    yield request.param
    sim.configure(mode="threads", races="record", h2d_gbps=0.0)


def turn(residency, block, x):
    residency.load()
    y = block(x)
    residency.unbind()
    return y


@pytest.mark.parametrize("pin", [True, False])
def test_repeated_use_has_no_race_and_the_results_of_the_host(timing, pin, block, device):
    x = torch.randn(4, 6)
    with torch.no_grad():
        expected = block(x)
        residency = ModuleResidency(block, device, pin_memory=pin)
        on_device = x.to(device)
        for step in range(4):
            assert torch.equal(turn(residency, block, on_device).cpu(), expected)
            if step % 2:
                residency.drop()
            else:
                block.scale.mul_(1)  # an edit: the same buffer is filled again
        residency.restore()
    assert sim.races() == []


def test_uses_on_several_streams_are_waited_for(timing, block, device):
    x = torch.randn(4, 6)
    with torch.no_grad():
        expected = block(x)
        residency = ModuleResidency(block, device)
        xs = x.to(device)
        streams = [torch.Stream(device) for _ in range(3)]
        torch.accelerator.synchronize(device)
        results = []
        for stream in streams:
            with stream:
                results.append(turn(residency, block, xs))
        with streams[0]:
            residency.load()
            results.append(block(xs))
        with streams[1]:  # left on another stream than it was entered on
            residency.offload()
            residency.load()
            results.append(block(xs))
        residency.offload()
        residency.load()
        residency.load()
        residency.restore()
        for stream in streams:
            stream.synchronize()
        assert all(torch.equal(result.cpu(), expected) for result in results)
    assert sim.races() == []


def test_a_loaded_module_that_is_loaded_again_on_another_stream_waits_there(timing, block, device):
    x = torch.randn(4, 6, device=device)
    other = torch.Stream(device)
    torch.accelerator.synchronize(device)
    residency = ModuleResidency(block, device)
    with torch.no_grad():
        residency.load()
        with other:
            residency.load()
            block(x)
        residency.restore()
    other.synchronize()
    assert sim.races() == []


def test_what_was_written_on_another_stream_is_copied_back_after_it(timing, block, device):
    other = torch.Stream(device)
    residency = ModuleResidency(block, device)
    with torch.no_grad():
        with other:
            residency.load()
            block.scale.fill_(4.0)
        residency.offload()
    assert block.scale.tolist() == [4.0] * 6
    residency.restore()
    assert sim.races() == []


def test_device_memory_that_nobody_gave_back_is_freed_in_order(timing, make_block, device):
    block = make_block()
    x = torch.randn(4, 6, device=device)
    other = ModuleResidency(make_block(), device)  # as large, so that it gets the same memory
    residency = ModuleResidency(block, device)
    with torch.no_grad():
        turn(residency, block, x)
    del residency
    gc.collect()
    assert sim.pinned_bytes() == 0
    assert sim.allocated() < 4096
    for _ in range(3):
        other.load()
        other.offload()
    other.restore()
    assert sim.races() == []


def test_dropping_everything_without_restore_frees_all(make_block, device):
    block = make_block()
    residency = ModuleResidency(block, device)
    residency.load()
    del block, residency
    gc.collect()
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


def test_a_repeated_bind_and_unbind_allocates_nothing_and_never_blocks_the_host(block, device):
    residency = ModuleResidency(block, device)
    with torch.no_grad():
        residency.load()
        residency.unbind()
    sim.configure(mode="virtual", launch=0.0)
    try:
        sim.reset_counters()
        sim.spin(10.0)
        start = sim.clock()
        stream = Accelerator.of(device).current_stream()
        for _ in range(5):
            residency.load()
            residency.unbind()
        assert not stream.query()  # the host ran ahead of the kernel
        assert (sim.allocation_count(), sim.h2d_bytes(), sim.d2h_bytes()) == (0, 0, 0)
        assert start <= sim.clock()
    finally:
        sim.configure(mode="threads", launch=5e-6)
    residency.restore()


# ---- mutations: a test above must fail where a wait is taken away ----


def scenario(block, device):
    x = torch.randn(4, 6, device=device)
    residency = ModuleResidency(block, device)
    with torch.no_grad():
        for _ in range(3):
            turn(residency, block, x)
            block.scale.mul_(1)
        residency.drop()
        turn(residency, block, x)
        residency.restore()


def found(block, device):
    try:
        scenario(block, device)
        return [race.kind for race in sim.races()]
    finally:
        sim.reset_races()


def test_without_mutation_the_scenario_has_no_race(timing, block, device):
    assert found(block, device) == []


def test_without_the_wait_for_uses_a_race_is_found(block, device, monkeypatch):
    monkeypatch.setattr("omni_offload.residency.device._order_after", lambda *_: None)
    assert found(block, device)


def test_without_the_wait_before_a_buffer_is_filled_again_a_race_is_found(block, device, monkeypatch):
    monkeypatch.setattr(DeviceBuffer, "order_after_uses", lambda _: None)
    assert found(block, device)


def test_without_the_wait_for_the_copy_a_race_is_found(block, device, monkeypatch):
    sim.configure(h2d_gbps=1e-4)
    monkeypatch.setattr(ModuleResidency, "_await_copies", lambda *_: None)
    assert "write-then-read" in found(block, device)


def test_without_the_record_of_a_use_a_race_is_found(block, device, monkeypatch):
    monkeypatch.setattr(ModuleResidency, "_note_use", lambda *_: None)
    assert found(block, device)


def test_without_the_hosts_wait_for_a_copy_in_flight_an_edit_reaches_it(holding, device, monkeypatch):
    monkeypatch.setattr(ModuleResidency, "_note_use", lambda *_: None)
    module = holding(torch.ones(1 << 18))
    residency = ModuleResidency(module, device)
    sim.configure(h2d_gbps=0.1)
    with sim.watch_host():
        residency.load()
        residency.unbind()
        module.p0.fill_(0.0)
    assert any("host" in (race.first_on, race.second_on) for race in sim.races())
    torch.accelerator.synchronize(device)
    sim.reset_races()
    monkeypatch.undo()
    residency.restore()


def test_with_the_hosts_wait_such_an_edit_is_ordered(holding, device):
    module = holding(torch.ones(1 << 18))
    residency = ModuleResidency(module, device)
    sim.configure(h2d_gbps=0.1)
    with sim.watch_host():
        residency.load()
        residency.unbind()
        module.p0.fill_(0.0)
    assert sim.races() == []
    residency.restore()


def test_the_host_waits_at_the_end_of_a_use_for_a_copy_in_flight(holding, device):
    residency = ModuleResidency(holding(torch.ones(1 << 10)), device)
    sim.configure(mode="virtual", h2d_gbps=1e-3)  # the host's own work takes no time
    try:
        residency.load()
        assert residency.in_flight
        residency.unbind()
        assert not residency.in_flight
    finally:
        sim.configure(mode="threads", h2d_gbps=0.0)
    residency.restore()
