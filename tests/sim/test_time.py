"""Virtual time is exact and repeatable; in threads mode copies really are asynchronous."""

import time

import pytest
import torch

from omni_offload.testing import sim

BLOCKS, COPY, WORK = 8, 32 * 2**20 / 2e9, 0.016  # 32 MiB blocks at 2 GB/s, 16 ms of work each


class Slots:
    """A ring of device buffers that one stream fills and another reads."""

    def __init__(self, device, number):
        self.masters = [torch.empty(8 << 20, pin_memory=True) for _ in range(2)]
        self.buffers = [torch.empty(8 << 20, device=device) for _ in range(number)]
        self.copy, self.compute = torch.Stream(device), torch.Stream(device)
        self.ready = [torch.Event(device) for _ in range(number)]
        self.free = [torch.Event(device) for _ in range(number)]

    def fetch(self, block):
        slot = block % len(self.buffers)
        with self.copy:
            if block >= len(self.buffers):
                self.copy.wait_event(self.free[slot])
            self.buffers[slot].copy_(self.masters[block % 2], non_blocking=True)
            self.ready[slot].record()

    def work(self, block, seconds=WORK):
        slot = block % len(self.buffers)
        with self.compute:
            self.compute.wait_event(self.ready[slot])
            sim.spin(seconds)
            self.free[slot].record()


def overlapped(device):
    slots = Slots(device, 2)
    start = sim.clock()
    slots.fetch(0)
    for block in range(BLOCKS):
        if block + 1 < BLOCKS:
            slots.fetch(block + 1)
        slots.work(block)
    torch.accelerator.synchronize(device)
    return sim.clock() - start


def serial(device):
    slots = Slots(device, 1)
    start = sim.clock()
    for block in range(BLOCKS):
        slots.fetch(block)
        slots.work(block)
    torch.accelerator.synchronize(device)
    return sim.clock() - start


def test_overlap_takes_the_time_it_must(device):
    sim.configure(h2d_gbps=2.0, launch=0.0)
    assert serial(device) == pytest.approx(BLOCKS * (COPY + WORK), abs=1e-9)
    assert overlapped(device) == pytest.approx(BLOCKS * COPY + WORK, abs=1e-9)
    assert sim.races() == []


def test_time_is_equal_to_the_last_bit(device):
    sim.configure(h2d_gbps=1.7, launch=3e-6, copy_latency=1e-5)
    times = set()
    for offset in (0.0, 0.1, 12.345):
        sim.host_work(offset)
        times.add(overlapped(device))
    assert len(times) == 1


def test_overlap_in_threads_mode(device):
    sim.configure(mode="threads", h2d_gbps=2.0)
    expected = BLOCKS * COPY + WORK
    assert expected <= min(overlapped(device) for _ in range(3)) < BLOCKS * (COPY + WORK)
    assert sim.races() == []


def test_virtual_time_costs_no_wall_time(device):
    start, virtual = time.perf_counter(), sim.clock()
    sim.spin(1000.0)
    sim.host_work(100.0)
    torch.accelerator.synchronize()
    assert sim.clock() - virtual == pytest.approx(1000.0, rel=1e-6)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(("direction", "rate"), [("h2d_gbps", 4.0), ("d2h_gbps", 2.0)])
def test_copy_takes_latency_and_bandwidth(device, direction, rate):
    sim.configure(**{direction: rate}, copy_latency=1e-3, launch=0.0)
    host, there = torch.empty(1000, pin_memory=True), torch.empty(1000, device=device)
    start = sim.clock()
    (there.copy_ if direction == "h2d_gbps" else host.copy_)(host if direction == "h2d_gbps" else there)
    assert sim.clock() - start == pytest.approx(1e-3 + 4000 / rate / 1e9, abs=1e-9)


def test_directions_overlap_and_one_direction_is_shared(device):
    sim.configure(h2d_gbps=1.0, d2h_gbps=1.0, launch=0.0)
    host, there = torch.empty(2, 1000, pin_memory=True), torch.empty(2, 1000, device=device)
    streams = [torch.Stream(device), torch.Stream(device)]

    def both(*copies):
        start = sim.clock()
        for stream, (to, source) in zip(streams, copies, strict=True):
            with stream:
                to.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        return sim.clock() - start

    far = torch.empty(1000, device="sim:1")
    torch.sim.synchronize(1)
    assert both((there[0], host[0]), (host[1], there[1])) == pytest.approx(4e-6, abs=1e-9)
    assert both((there[0], host[0]), (there[1], host[1])) == pytest.approx(8e-6, abs=1e-9)
    streams[1] = torch.Stream("sim:1")
    start = sim.clock()
    assert both((there[0], host[0]), (far, host[1])) == pytest.approx(4e-6, abs=1e-9)
    torch.sim.synchronize(1)
    assert sim.clock() - start == pytest.approx(4e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "operation", "expected"),
    [
        ({"flops": 1e9}, lambda x: x @ x, 2 * 64**3 / 1e9),
        ({"flops": 1e9}, lambda x: torch.nn.functional.linear(x, x, x[0]), 2 * 64**3 / 1e9),
        ({"flops": 1e9}, lambda x: torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3]), 2 * 62 * 62 * 9 / 1e9),
        ({"memory_gbps": 1.0}, lambda x: x + x, 2 * 64 * 64 * 4 / 1e9),
        ({"memory_gbps": 1.0}, lambda x: x.view(-1)[5:].unfold(0, 2, 2), 0),
        ({"launch": 1e-3}, lambda x: x + x, 1e-3),
        ({"launch": 1e-3}, lambda x: x.view(-1)[5:].t().detach(), 0),
    ],
)
def test_kernel_takes_the_longer_of_arithmetic_and_memory(device, settings, operation, expected):
    x = torch.ones(64, 64, device=device)
    sim.configure(**{"launch": 0.0, "flops": 0.0, "memory_gbps": 0.0, **settings})
    torch.accelerator.synchronize()
    start = sim.clock()
    operation(x)
    assert sim.clock() - start == pytest.approx(expected, abs=1e-9)


def test_attention_is_charged(device):
    x = torch.ones(1, 2, 16, 8, device=device)
    sim.configure(launch=0.0, flops=1e9, memory_gbps=0.0)
    start = sim.clock()
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert sim.clock() - start == pytest.approx(4 * 2 * 16 * 8 * 16 / 1e9, abs=1e-9)


def test_host_runs_ahead_until_it_reads(device):
    x = torch.ones(4, device=device)
    start = sim.clock()
    done = torch.Event(device)
    sim.spin(1.0)
    done.record()
    assert not done.query()
    assert x.sum().item() == 4
    assert done.query()
    assert sim.clock() - start >= 1.0


@pytest.mark.parametrize("mode", ["virtual", "threads"])
def test_pageable_copy_blocks_the_host_and_pinned_does_not(device, mode):
    sim.configure(mode=mode, h2d_gbps=1.0, launch=0.0)
    pageable, there = torch.ones(4 << 20), torch.empty(4 << 20, device=device)
    pinned = pageable.pin_memory()
    for source, non_blocking, waits in ((pinned, True, False), (pinned, False, True), (pageable, True, True)):
        torch.accelerator.synchronize()
        there.copy_(source, non_blocking=non_blocking)
        assert torch.accelerator.current_stream().query() is waits
    torch.accelerator.synchronize()


def test_registered_memory_is_copied_without_blocking(device):
    sim.configure(h2d_gbps=1.0)
    host, there = torch.ones(1 << 20), torch.empty(1 << 19, device=device)
    torch.sim.host_register(host[1 << 18 :].data_ptr(), 3 << 20)
    there.copy_(host[1 << 18 :][: 1 << 19], non_blocking=True)
    assert not torch.accelerator.current_stream().query()
    torch.accelerator.synchronize()
    there.copy_(host[: 1 << 19], non_blocking=True)
    assert torch.accelerator.current_stream().query()
    torch.sim.host_unregister(host[1 << 18 :].data_ptr())
    assert torch.equal(there.cpu(), torch.ones(1 << 19))


def test_trace_is_the_timeline(device):
    sim.configure(h2d_gbps=1.0, launch=0.0, memory_gbps=1.0)
    host, there, side = torch.ones(1000).pin_memory(), torch.empty(1000, device=device), torch.Stream(device)
    with sim.trace() as spans:
        with side:
            there.copy_(host, non_blocking=True)
        torch.sim.current_stream().wait_stream(side)
        there.add_(1)
    copy, add = spans
    assert (copy.what, copy.device, copy.stream, copy.bytes) == ("H2D copy", 0, side.stream_id, 4000)
    assert copy.end - copy.start == pytest.approx(4e-6, abs=1e-9)
    assert (add.what, add.stream, add.bytes) == ("aten::add_", 0, 4000)
    assert add.start == copy.end


def test_traces_nest_and_survive_exceptions(device):
    with pytest.raises(KeyError), sim.trace() as outer:
        sim.spin(1.0)
        with sim.trace() as inner:
            sim.spin(2.0)
        raise KeyError
    assert [span.end - span.start for span in inner] == [2.0]
    assert [span.end - span.start for span in outer] == [1.0, 2.0]
    sim.spin(1.0)
    assert len(outer) == 2


def test_trace_in_threads_mode_waits_for_the_queues_but_orders_nothing(device):
    sim.configure(mode="threads", h2d_gbps=1.0)
    there, side = torch.empty(1000, device=device), torch.Stream(device)
    with sim.trace() as spans, side:
        there.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
        sim.spin(0.01)
    assert [span.what for span in spans] == ["H2D copy", "spin"]
    assert spans[0].end - spans[0].start >= 4e-6
    there.add(1)
    assert len(sim.races()) == 1


def test_switching_modes_keeps_what_is_queued(device):
    sim.configure(mode="threads", h2d_gbps=1.0)
    there, side, done = torch.empty(1 << 20, device=device), torch.Stream(device), torch.Event(device)
    with side:
        there.copy_(torch.ones(1 << 20).pin_memory(), non_blocking=True)
        done.record()
    sim.configure(mode="virtual")
    torch.sim.current_stream().wait_event(done)
    assert torch.equal(there.cpu(), torch.ones(1 << 20))
    sim.configure(mode="threads")
    assert done.query()
    assert sim.races() == []


@pytest.mark.parametrize(("count", "waits"), [(4, False), (1 << 20, True)])
def test_small_pageable_copies_do_not_queue_behind_the_copy_engine(device, count, waits):
    """A pageable host-to-device copy of up to 64 KiB travels with its stream's commands; a larger one waits for the engine."""
    sim.configure(mode="virtual", h2d_gbps=1, launch=0, copy_latency=0)
    bulk, target = torch.empty(10**8, dtype=torch.uint8, pin_memory=True), torch.empty(10**8, dtype=torch.uint8, device=device)
    copies = torch.Stream(device)
    copies.wait_stream(torch.accelerator.current_stream(device))
    start = torch.Event(device, enable_timing=True)
    end = torch.Event(device, enable_timing=True)
    with copies:
        target.copy_(bulk, non_blocking=True)
    start.record()
    torch.ones(count).to(device)
    end.record()
    assert (start.elapsed_time(end) >= 100) == waits
