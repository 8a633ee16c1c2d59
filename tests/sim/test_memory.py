"""Memory is accounted for exactly, runs out where it should, and fails where a test asks it to."""

import mmap

import pytest
import torch

from omni_offload.testing import sim

# ---- device memory --------------------------------------------------------------------------------------------------


def test_allocated_and_peak_count_units_of_512_bytes(device):
    x = torch.empty(1, device=device)
    y = torch.empty(513, dtype=torch.uint8, device=device)
    assert sim.allocated() == sim.allocated("sim:0") == 512 + 1024
    del y
    assert (sim.allocated(), sim.peak(), sim.allocated(1)) == (512, 1536, 0)
    sim.reset_peak()
    assert sim.peak() == 512
    del x
    assert sim.allocated() == 0


def test_outputs_of_operators_are_charged(device):
    x = torch.ones(256, device=device)
    y = x + 1
    assert sim.allocated() == 2048
    assert y[3:].untyped_storage().nbytes() == 1024
    y.add_(1)
    assert (sim.allocated(), sim.allocation_count()) == (2048, 2)


def test_accounting_of_another_device_is_its_own(device):
    x = torch.ones(256, device="sim:1")
    assert (sim.allocated(0), sim.allocated(1), sim.allocated(x.device)) == (0, 1024, 1024)
    with pytest.raises(ValueError, match="expected a sim device"):
        sim.allocated("cpu")


def test_capacity_is_an_out_of_memory_error_of_torch(device):
    sim.configure(capacity=4096)
    x = torch.empty(512, device=device)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 out of memory\. Tried to allocate 4096 bytes"):
        torch.empty(1024, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        (x + 1) + (x + 2)
    assert sim.allocated() == 2048
    torch.empty(1024, device="sim:1")
    torch.empty(512, device=device)


def test_every_allocation_of_a_program_can_fail(device):
    def program():
        x = torch.ones(8).to(device)
        return (x + 1) @ x

    program()
    count = sim.allocation_count()
    assert count == 3
    for n in range(count):
        sim.configure(fail_alloc_in=n)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            program()
        assert sim.current_settings().fail_alloc_in == -1
        assert sim.allocated() == 0
        program()


def test_countdown_is_left_alone_by_other_changes(device):
    sim.configure(fail_alloc_in=2)
    torch.empty(1, device=device)
    sim.configure(poison=False)
    assert sim.current_settings().fail_alloc_in == 1


def test_failed_allocation_leaves_no_trace(device):
    x = torch.ones(4, device=device)
    sim.configure(fail_alloc_in=0)
    with pytest.raises(torch.OutOfMemoryError):
        x.resize_(100000)
    assert sim.allocated() == 512
    assert torch.equal(x.cpu()[:4], torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_fresh_memory_is_poisoned(device, dtype):
    assert torch.empty(3, dtype=dtype, device=device).float().isnan().all()
    assert torch.empty(3, dtype=dtype, pin_memory=True).float().isnan().all()


# ---- pinned memory ---------------------------------------------------------------------------------------------------


def test_pinned_memory_is_charged_exactly(device):
    x = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
    y = torch.ones(3).pin_memory()
    assert sim.pinned_bytes() == 1012
    assert (x.is_pinned(), y.is_pinned(), torch.ones(3).is_pinned()) == (True, True, False)
    assert torch.equal(y, torch.ones(3))
    del x, y
    assert (sim.pinned_bytes(), sim.pinned_peak()) == (0, 1012)
    sim.reset_counters()
    assert sim.pinned_peak() == 0


def test_views_and_storages_of_pinned_memory_are_pinned(device):
    x = torch.empty(16, pin_memory=True)
    assert x[5:].is_pinned()
    assert x.view(4, 4).t()[1:].is_pinned()
    assert x.untyped_storage().is_pinned()
    assert torch.frombuffer(memoryview(x[4:].numpy()), dtype=torch.float32).is_pinned()


def test_pinned_capacity(device):
    sim.configure(pinned_capacity=100)
    x = torch.empty(60, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(RuntimeError, match="pinned host memory exhausted: 41 bytes requested, 60 of 100 in use"):
        torch.empty(41, dtype=torch.uint8, pin_memory=True)
    y = torch.empty(40, dtype=torch.uint8, pin_memory=True)
    del x, y
    host = torch.empty(101, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="exhausted"):
        torch.sim.host_register(host.data_ptr(), 101)
    assert sim.pinned_bytes() == 0


def test_registered_memory_is_pinned_in_place(device):
    memory = mmap.mmap(-1, 8192)
    host = torch.frombuffer(memory, dtype=torch.float32)
    torch.sim.host_register(host.data_ptr(), 4096)
    assert (host.is_pinned(), sim.pinned_bytes()) == (True, 4096)
    torch.sim.host_unregister(host.data_ptr())
    assert (host.is_pinned(), sim.pinned_bytes(), sim.pinned_peak()) == (False, 0, 4096)


def test_wrong_registrations_are_refused(device):
    host = torch.empty(100, dtype=torch.uint8)
    pointer = host.data_ptr()
    torch.sim.host_register(pointer + 10, 20)
    for start, size in ((10, 20), (0, 11), (29, 1), (5, 50)):
        with pytest.raises(RuntimeError, match="already"):
            torch.sim.host_register(pointer + start, size)
    torch.sim.host_register(pointer + 30, 1)
    for start in (0, 11, 99):
        with pytest.raises(RuntimeError, match="no range that starts here"):
            torch.sim.host_unregister(pointer + start)
    with pytest.raises(RuntimeError, match="at least one byte"):
        torch.sim.host_register(pointer, 0)
    torch.sim.host_unregister(pointer + 10)
    torch.sim.host_unregister(pointer + 30)
    pinned = torch.empty(4, pin_memory=True)
    with pytest.raises(RuntimeError, match="no range that starts here"):
        torch.sim.host_unregister(pinned.data_ptr())


def test_every_pinning_can_fail(device):
    host = torch.empty(100, dtype=torch.uint8)
    sim.configure(fail_pin_in=1)
    torch.empty(1, pin_memory=True)
    with pytest.raises(RuntimeError, match="injected"):
        torch.sim.host_register(host.data_ptr(), 100)
    torch.sim.host_register(host.data_ptr(), 100)
    torch.sim.host_unregister(host.data_ptr())
    assert sim.pinned_bytes() == 0
    assert sim.pin_count() == 2


# ---- copies -------------------------------------------------------------------------------------------------------------


def test_copies_count_their_payload(device):
    x = torch.ones(100)
    y = x.to(device)
    assert (sim.h2d_bytes(), sim.d2h_bytes()) == (400, 0)
    y.to(torch.float64).cpu()
    y.t().to("sim:1")
    assert (sim.h2d_bytes(), sim.d2h_bytes()) == (400, 800)
    torch.empty(10, 10, dtype=torch.bfloat16, device=device).copy_(x.view(10, 10).t())
    assert sim.h2d_bytes() == 600
    sim.reset_counters()
    assert (sim.h2d_bytes(), sim.d2h_bytes()) == (0, 0)


def test_freed_memory_that_a_recorded_stream_uses_is_kept(device):
    side = torch.Stream(device)
    x = torch.empty(1024, device=device)
    with side:
        sim.spin(1.0)
    x.record_stream(side)
    del x
    assert sim.allocated() == 0
    assert torch.accelerator.memory_reserved() == 4096
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 0


def test_allocation_at_capacity_waits_for_recorded_streams(device):
    sim.configure(capacity=4096)
    side = torch.Stream(device)
    x = torch.empty(1024, device=device)
    with side:
        sim.spin(1.0)
    x.record_stream(side)
    del x
    start = sim.clock()
    torch.empty(1024, device=device)
    sim.host_work(0.0)
    assert sim.clock() >= start
    assert side.query()


def test_freed_blocks_of_another_device_are_not_waited_for(device):
    sim.configure(capacity=4096)
    side = torch.Stream("sim:1")
    x = torch.empty(1024, device="sim:1")
    with side:
        sim.spin(1.0)
    x.record_stream(side)
    del x
    y = torch.empty(1024, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device=device)
    assert not side.query()
    assert y.device == device


def test_registered_memory_counts_as_pinned(device):
    """Memory that is registered rather than allocated pinned is pinned for torch, too."""
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    torch.sim.host_register(memory.data_ptr(), memory.numel())
    try:
        assert memory.is_pinned()
    finally:
        torch.sim.host_unregister(memory.data_ptr())
    assert not memory.is_pinned()
