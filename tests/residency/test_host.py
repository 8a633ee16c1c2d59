"""Host memory: how much is pinned, what is not goes through the staging ring, and all of it is given back."""

import gc
import logging
from types import SimpleNamespace

import pytest
import torch

from omni_offload import ModuleResidency
from omni_offload.accelerator import Accelerator, PinnedMemory
from omni_offload.errors import OffloadConfigError
from omni_offload.residency import ByteMeter, ResidencyContext, context, host_memory
from omni_offload.residency.device import DeviceBuffer
from omni_offload.residency.host import StagingRing
from omni_offload.residency.transfer import place, transfers
from omni_offload.testing import sim

KIB = 1024


@pytest.fixture
def engine(device):
    return Accelerator.of(device)


@pytest.fixture
def four(holding):
    """Four weights of 16 KiB."""
    return holding(*(torch.full((4 * KIB,), float(i)) for i in range(1, 5)))


@pytest.fixture
def no_registration(monkeypatch):
    """Let the device be one that cannot lock memory that exists."""
    module = torch.get_device_module(torch.device("sim"))
    parts = {name: getattr(module, name) for name in dir(module) if name not in ("host_register", "host_unregister")}
    monkeypatch.setattr(torch, "get_device_module", lambda *_: SimpleNamespace(**parts))


def used(residency, module, device):
    residency.load()
    assert [int(p[-1]) for p in module.parameters()] == [1, 2, 3, 4]
    residency.offload()
    assert [int(p[0]) for p in module.parameters()] == [1, 2, 3, 4]


def test_weights_beyond_the_limit_stay_pageable_and_go_through_the_ring(four, engine, device, monkeypatch):
    staged = []
    original = StagingRing.copy
    monkeypatch.setattr(StagingRing, "copy", lambda ring, target, source: staged.append(source.numel()) or original(ring, target, source))
    own = ResidencyContext(engine, host_limit=48 * KIB)
    residency = ModuleResidency(four, device, context=own)
    used(residency, four, device)
    assert residency.pinned_bytes == 32 * KIB
    assert staged
    assert sum(staged) % (32 * KIB) == 0  # the pageable half, at each load
    assert not residency.overlaps or residency.host_bytes < context.LATE_PIN_BYTES
    assert own.host.pinned_bytes == sim.pinned_bytes() == 32 * KIB + 12 * KIB
    residency.restore()
    own.close()
    own.close()
    assert sim.pinned_bytes() == 0


def test_within_the_limit_everything_is_pinned_exactly_and_there_is_no_ring(four, engine, device):
    own = ResidencyContext(engine, host_limit=64 * KIB)
    residency = ModuleResidency(four, device, context=own)
    used(residency, four, device)
    assert sim.pinned_bytes() == own.host.pinned_bytes == 64 * KIB
    residency.restore()
    assert sim.pinned_bytes() == 0


def test_a_limit_that_leaves_no_room_for_the_ring_is_an_error_and_nothing_is_pinned(four, engine, device, photograph):
    check = photograph(four)
    residency = ModuleResidency(four, device, context=ResidencyContext(engine, host_limit=4 * KIB))
    with pytest.raises(OffloadConfigError, match=r"host_memory=4096 bytes leaves 4096 .* needs 8192"):
        residency.load()
    assert sim.pinned_bytes() == 0
    residency.restore()
    check()


def test_the_ring_takes_less_where_a_quarter_of_the_limit_is_not_left(four, engine, device):
    own = ResidencyContext(engine, host_limit=80 * KIB)
    first = ModuleResidency(four, device, context=own)
    first.prepare()
    own.host.reserve_staging()
    own.host.reserve_staging()
    assert own.host.pinned_bytes == 64 * KIB + 10 * KIB
    first.restore()
    own.close()


def test_without_pinning_there_is_no_ring(engine):
    own = ResidencyContext(engine, pin_memory=False, host_limit=1)
    own.host.reserve_staging()
    assert own.host.pinned_bytes == 0


@pytest.mark.parametrize(("ceiling", "ring"), [(48 * KIB, True), (4 * KIB, False)])
def test_the_containers_limit_counts_without_one_of_our_own_and_warns(ceiling, ring, four, engine, device, monkeypatch, caplog):
    own = ResidencyContext(engine)
    monkeypatch.setattr(own.host, "_ceiling", ceiling)
    residency = ModuleResidency(four, device, context=own)
    with caplog.at_level(logging.WARNING):
        used(residency, four, device)
    assert (own.host.pinned_bytes > 0) == ring
    assert own.host.pinned_bytes <= ceiling
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    residency.restore()
    own.close()


def test_a_residency_on_its_own_gives_its_ring_back(four, device, monkeypatch):
    residency = ModuleResidency(four, device)
    monkeypatch.setattr(residency._context.host, "_ceiling", 48 * KIB)
    used(residency, four, device)
    assert sim.pinned_bytes() > residency.pinned_bytes > 0
    residency.restore()
    assert sim.pinned_bytes() == 0


def test_a_component_of_many_regions_is_pinned_whole(four, engine, device, monkeypatch):
    monkeypatch.setattr(context, "_REGION_BYTES", 20 * KIB)
    residency = ModuleResidency(four, device)
    used(residency, four, device)
    assert (residency.pinned_bytes, sim.pinned_bytes()) == (64 * KIB, 64 * KIB)
    residency.restore()


def test_what_the_weights_came_from_is_freed_region_by_region(holding, engine, device, monkeypatch):
    from torch.multiprocessing.reductions import StorageWeakRef

    monkeypatch.setattr(context, "_REGION_BYTES", 20 * KIB)
    module = holding(*(torch.ones(4 * KIB) for _ in range(3)))
    sources = [StorageWeakRef(p.untyped_storage()) for p in module.parameters()]
    alive = []
    real = host_memory.PinnedMemory

    class Watched(real):
        def __init__(self, *args):
            alive.append(sum(not source.expired() for source in sources))
            super().__init__(*args)

    monkeypatch.setattr(host_memory, "PinnedMemory", Watched)
    residency = ModuleResidency(module, device)
    residency.prepare()
    assert alive == [3, 2, 1]
    residency.restore()


def test_regions_that_no_group_lies_in_any_more_are_unpinned(four, engine, device):
    own = ResidencyContext(engine)
    residency = ModuleResidency(four, device, context=own)
    residency.load()
    residency.offload()
    for p in four.parameters():
        p.data = p.data.clone()
    residency.validate()
    assert sim.pinned_bytes() == 0  # too few bytes to be pinned late
    residency.restore()


# ---- devices that cannot lock memory that exists ----


def test_powers_of_two_are_charged_and_given_back_at_restore(no_registration, holding, engine, device, photograph):
    module = holding(torch.ones(5 * KIB))
    check = photograph(module)
    residency = ModuleResidency(module, device)
    residency.load()
    assert residency._context.host.pinned_bytes == 32 * KIB
    residency.restore()
    check()
    assert residency._context.host.pinned_bytes == 0
    assert not module.p0.is_pinned()


def test_what_is_charged_counts_against_the_limit(no_registration, four, engine, device):
    own = ResidencyContext(engine, host_limit=48 * KIB)
    residency = ModuleResidency(four, device, context=own)
    used(residency, four, device)
    assert own.host.pinned_bytes <= 48 * KIB
    residency.restore()
    own.close()


def test_inference_tensors_come_back_from_such_memory_too(no_registration, make_block, device):
    with torch.inference_mode():
        block = make_block()
    residency = ModuleResidency(block, device)
    residency.load()
    residency.restore()
    assert block.scale.is_inference()
    assert not block.scale.is_pinned()


# ---- the ring itself ----


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 3 * 4096 + 5])
def test_the_ring_copies_every_byte_in_chunks(nbytes, engine):
    ring = StagingRing(engine, 8192)
    assert ring.nbytes == sim.pinned_bytes() == 8192
    source = torch.arange(nbytes).to(torch.uint8)
    target = engine.allocate(nbytes)
    sim.configure(h2d_gbps=0.01)
    with torch.inference_mode():
        for _ in range(2):
            ring.copy(target, source)
    engine.copy_stream.synchronize()
    assert torch.equal(target.cpu(), source)
    ring.unpin()


def test_the_ring_never_overwrites_a_chunk_that_is_still_read(engine):
    ring = StagingRing(engine, 8192)
    sim.configure(h2d_gbps=0.01)
    with sim.watch_host():
        target = engine.allocate(5 * 4096)
        ring.copy(target, torch.arange(5 * 4096).to(torch.uint8))
    assert sim.races() == []
    engine.copy_stream.synchronize()
    ring.unpin()


# ---- counting ----


def test_a_holder_that_is_gone_or_counted_off_holds_nothing():
    meter = ByteMeter()

    class Holder:
        pass

    a, b = Holder(), Holder()
    meter.add(a, 10)
    meter.add(b, 5)
    meter.remove(a)
    meter.remove(a)
    assert (meter.current, meter.peak) == (5, 15)
    del b
    assert meter.current == 0


def test_a_region_of_nothing_is_free(engine):
    assert PinnedMemory.cost(engine, 0) == 0


def test_a_ring_without_any_limit_has_its_full_size(engine, monkeypatch):
    own = ResidencyContext(engine)
    monkeypatch.setattr(own.host, "_ceiling", None)
    own.host.reserve_staging()
    assert own.host.pinned_bytes == 32 << 20
    own.close()


def test_whether_a_copy_is_in_flight_is_known(four, device):
    residency = ModuleResidency(four, device)
    assert not residency.in_flight
    sim.configure(h2d_gbps=0.001)
    residency.fetch()
    assert residency.in_flight
    torch.accelerator.synchronize(device)
    assert not residency.in_flight
    residency.restore()


# ---- misuse ----


def test_a_group_without_a_device_copy_cannot_be_bound_and_does_nothing_else(four, device):
    residency = ModuleResidency(four, device)
    residency.prepare()
    group = residency._groups[0]
    with pytest.raises(RuntimeError, match="without a device copy"):
        residency.bind()
    group.forget()
    group.remember()
    group.drop(residency)
    assert (group.current(), group.placed, group.unbind(residency), group.unbind(residency, force=True)) == (False, False, 0, 0)
    residency.restore()


def test_a_freed_buffer_gives_no_room(four, device):
    residency = ModuleResidency(four, device)
    residency.fetch()
    copy = residency._groups[0].copy
    residency.drop()
    with pytest.raises(RuntimeError, match="was freed"):
        copy.buffer.take(residency, 0, 1)
    copy.buffer.free()
    residency.restore()


def test_a_buffer_is_freed_when_its_last_taker_gives_it_back(engine):
    buffer = DeviceBuffer(engine, 128, ByteMeter())
    buffer.take("one", 0, 64)
    buffer.take("two", 64, 64)
    buffer.give_back("one")
    assert buffer.raw is not None
    buffer.give_back("two")
    assert buffer.raw is None


def test_a_buffer_that_nobody_gave_back_is_freed_after_its_uses(engine, monkeypatch):
    waited = []
    monkeypatch.setattr(Accelerator, "after", lambda _, event: waited.append(event))
    buffer = DeviceBuffer(engine, 128, ByteMeter())
    event = torch.accelerator.current_stream(engine.device).record_event()
    buffer.uses[1] = event
    del buffer
    gc.collect()
    assert waited == [event]


def test_a_group_without_master_or_origin_stays_as_it_is(four, device):
    residency = ModuleResidency(four, device)
    residency.prepare()
    group = residency._groups[0]
    pointer = group.entries[0].tensor.data_ptr()
    group.back_to_origin()
    master, group.master = group.master, None
    group.move_master()
    group.repair()
    assert group.entries[0].tensor.data_ptr() == pointer
    group.master = master
    residency.restore()


def test_groups_that_cannot_travel_are_an_error_and_none_are_no_transfer(four, device):
    residency = ModuleResidency(four, device)
    residency.prepare()
    assert list(transfers([])) == []
    with pytest.raises(RuntimeError, match="a master and a device copy"):
        list(transfers(residency._groups[:1]))
    residency.restore()


def test_a_buffer_that_nothing_was_copied_to_is_waited_for_by_nobody(four, device):
    residency = ModuleResidency(four, device)
    residency.prepare()
    place(residency._groups, residency._accelerator, residency._context)
    residency.bind()
    assert four.p0.device == device
    residency.unbind()
    residency.restore()
