"""Devices by name, pinned memory of exact size, the limits of the container."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from omni_offload.accelerator import Accelerator, PinnedMemory, Registration, host_memory_limit, resolve_device, unsupported_reason
from omni_offload.accelerator import pinned as module
from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim


@pytest.fixture
def engine(device):
    yield Accelerator.of(device)
    sim.configure(fail_pin_in=-1)
    gc.collect()
    assert (sim.allocated(), sim.pinned_bytes(), sim.races()) == (0, 0, [])


def test_without_a_name_the_current_accelerator_is_meant(device):
    assert resolve_device() == resolve_device("sim") == resolve_device(device) == torch.device("sim", 0)


def test_a_given_index_is_kept(device):
    assert resolve_device("sim:1") == torch.device("sim", 1)


def test_an_index_that_is_not_there_is_refused(device):
    with pytest.raises(OffloadStateError, match=r"'sim:7', but there are 2 sim device"):
        resolve_device("sim:7")


@pytest.mark.parametrize(("name", "reason"), [("cpu", "on the host already"), ("mps", "shares its memory"), ("cuda", "accelerator is sim")])
def test_a_device_that_cannot_be_offloaded_from_is_refused_with_the_reason(name, reason, device):
    with pytest.raises(OffloadStateError, match=f"'{name}': .*{reason}"):
        resolve_device(name)
    assert unsupported_reason(device) is unsupported_reason(None) is None


def test_a_machine_without_accelerator_is_told(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(OffloadStateError, match="finds no accelerator"):
        resolve_device()
    assert "finds no accelerator" in unsupported_reason(None)
    assert "accelerator is none" in unsupported_reason(torch.device("cuda"))


def test_there_is_one_object_a_device(device):
    assert Accelerator.of(torch.device("sim", 0)) is Accelerator.of(torch.device("sim", 0))
    assert Accelerator.of(torch.device("sim", 0)) is not Accelerator.of(torch.device("sim", 1))


def test_copies_wait_for_events_and_events_for_copies(engine, device):
    sim.configure(mode="virtual", races="raise", h2d_gbps=1.0)
    try:
        memory = PinnedMemory(engine, 4096)
        memory.raw.fill_(3)
        target = engine.allocate(4096)
        engine.copy(target, memory.raw)
        engine.wait(engine.record_copies())
        total = target.sum()
        engine.after(engine.current_stream().record_event())
        engine.copy(target, memory.raw)
        engine.wait(engine.record_copies())
        assert total.item() == 4096 * 3
        del target, total
        memory.unpin()
    finally:
        sim.configure(mode="threads", races="record", h2d_gbps=0.0)


def test_a_pinned_region_has_exactly_the_size_and_its_slices_a_storage_each(engine):
    memory = PinnedMemory(engine, 1000)
    assert (sim.pinned_bytes(), memory.charged, memory.nbytes, memory.pinned) == (1000, 1000, 1000, True)
    part = memory.slice(100, 50)
    part.fill_(7)
    assert (part.untyped_storage().nbytes(), part.is_pinned(), memory.raw[100:150].sum().item()) == (50, True, 350)
    assert memory.slice(100, 0).numel() == 0
    memory.unpin()
    memory.unpin()
    assert (sim.pinned_bytes(), memory.pinned) == (0, False)
    assert part.tolist() == [7] * 50


def test_a_region_that_is_dropped_is_unpinned_and_its_slices_stay_valid(engine):
    memory = PinnedMemory(engine, 64)
    part = memory.slice(0, 64).fill_(1)
    del memory
    assert sim.pinned_bytes() == 0
    assert part.sum().item() == 64


def test_a_refused_registration_holds_nothing(engine):
    sim.configure(fail_pin_in=0)
    with pytest.raises(RuntimeError, match="pin"):
        PinnedMemory(engine, 64)
    assert sim.pinned_bytes() == 0


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_around_the_registration_leaves_nothing_pinned(after, engine, monkeypatch):
    registrar = module._registrar(engine.device)

    def register(pointer, nbytes):
        if after:
            registrar.register(pointer, nbytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_registrar", lambda _: module._Registrar(register, registrar.unregister))
    with pytest.raises(KeyboardInterrupt):
        PinnedMemory(engine, 64)
    gc.collect()
    assert sim.pinned_bytes() == 0


def test_memory_made_in_inference_mode_can_be_written_outside(engine):
    with torch.inference_mode():
        memory = PinnedMemory(engine, 64)
        part = memory.slice(0, 8)
        target = engine.allocate(64)
    part.zero_()
    memory.raw.zero_()
    engine.copy(target, memory.raw)
    assert not target.is_inference()
    engine.copy_stream.synchronize()


def test_a_device_without_host_registration_pins_powers_of_two_and_keeps_them(engine, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    memory = PinnedMemory(engine, 1000)
    assert (memory.charged, memory.stays_pinned, memory.pinned, memory.raw.is_pinned()) == (1024, True, True, True)
    assert PinnedMemory.cost(engine, 0) == 0
    part = memory.slice(8, 8)
    assert part.is_pinned()
    memory.unpin()
    assert memory.pinned
    del memory, part
    assert sim.pinned_bytes() == 0


def test_a_runtime_like_cudas_is_spoken_to_through_its_error_check(engine, monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda _pointer, nbytes, flags: calls.append(("register", nbytes, flags)) or 0,
        cudaHostUnregister=lambda _pointer: calls.append(("unregister",)) or 0,
    )
    fake = SimpleNamespace(cudart=lambda: runtime, check_error=lambda code: calls.append(("checked", code)))
    monkeypatch.setattr(torch, "get_device_module", lambda _: fake)
    PinnedMemory(engine, 64).unpin()
    assert calls == [("register", 64, 0), ("checked", 0), ("unregister",), ("checked", 0)]


def test_memory_that_exists_is_locked_until_it_ends_and_kept_as_long(engine):
    memory = bytearray(4096)
    pointer = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    registration = Registration(engine, pointer, 4096, memory)
    assert sim.pinned_bytes() == 4096
    kept = weakref.finalize(registration, list)
    registration.end()
    registration.end()
    assert sim.pinned_bytes() == 0
    dropped = Registration(engine, pointer, 4096, memory)
    del dropped, registration
    assert (sim.pinned_bytes(), kept.alive) == (0, False)


def test_memory_that_cannot_be_locked_is_let_go(engine, monkeypatch):
    memory = torch.zeros(64, dtype=torch.uint8)
    sim.configure(fail_pin_in=0)
    with pytest.raises(RuntimeError, match="pin"):
        Registration(engine, memory.data_ptr(), 64, memory)
    assert sim.pinned_bytes() == 0
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    with pytest.raises(RuntimeError, match="sim:0 cannot lock host memory that exists"):
        Registration(engine, memory.data_ptr(), 64, memory)


# ---- the limit of the container ----


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Return a function that lays out control groups; the process is in /a/b."""
    monkeypatch.setattr(module, "_CGROUPS", tmp_path)

    def lay(own="0::/a/b\n", **limits):
        proc = tmp_path / "self"
        proc.write_text(own)
        real = module.Path
        monkeypatch.setattr(module, "Path", lambda p: proc if p == "/proc/self/cgroup" else real(p))
        for name, text in limits.items():
            file = tmp_path / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            (file / "memory.max" if file.is_dir() else file.with_name(file.name)).parent.mkdir(exist_ok=True)
            file.mkdir(exist_ok=True)
            (file / "memory.max").write_text(text)

    return lay


def test_the_limit_is_the_smallest_of_all_groups_above_the_process(cgroups):
    cgroups(a="1000\n", a__b="max\n", other="5\n")
    assert host_memory_limit() == 1000


def test_the_limit_of_the_old_control_groups_counts_too(cgroups, tmp_path):
    cgroups()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000")
    assert host_memory_limit() == 2000


def test_without_limits_it_is_the_machines_memory(cgroups, tmp_path, monkeypatch):
    cgroups(own="4:memory:/x\n", a="max")
    assert host_memory_limit() > 1 << 20
    (tmp_path / "self").unlink()
    monkeypatch.delattr(module.os, "sysconf")
    assert host_memory_limit() is None


class _Collective:
    """Runs on a stream of its own, as a backend's collectives do, behind the stream that begins it."""

    def __init__(self, stream, seconds):
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            sim.spin(seconds)
        self._done = stream.record_event()

    def wait(self):
        torch.accelerator.current_stream().wait_event(self._done)


def test_a_gather_has_landed_before_later_copies_have(engine, device):
    """Whoever waits for a gather does not wait for the copies of gathers that were queued behind it."""
    sim.configure(mode="virtual", launch=0.0, copy_latency=0.0, h2d_gbps=1.0)
    source, target = PinnedMemory(engine, 1_000_000), engine.allocate(1_000_000)
    collectives = torch.Stream(device)
    start = torch.Event(device, enable_timing=True)
    start.record(engine.copy_stream)
    landed = []
    for nbytes in (1000, 999_000):  # at 1 GB/s the second takes 999 us to be copied
        engine.copy(target[:nbytes], source.raw[:nbytes])
        landed.append(engine.gather(lambda: _Collective(collectives, 5e-6)))
    moments = []
    for work in landed:
        waiting = torch.Stream(device)
        waiting.wait_event(engine.end_gather([work]))
        moments.append(torch.Event(device, enable_timing=True))
        moments[-1].record(waiting)
    engine.block()
    assert [start.elapsed_time(moment) for moment in moments] == pytest.approx([0.006, 1.005])
    source.unpin()
