"""Forks are refused, threads may share the device, and a process ends cleanly whatever is still queued."""

import multiprocessing
import subprocess
import sys
import textwrap
import threading

import torch

from omni_offload.testing import sim


def run(script):
    prelude = "import torch\nfrom omni_offload.testing import sim\ndevice = sim.install()\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # a deadlock ends the test
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def in_fork(kept, queue):
    try:
        torch.ones(1, device="sim")
    except RuntimeError as error:
        queue.put(str(error))
    kept.clear()


def test_forked_process_is_refused_as_with_cuda(device):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    kept = [torch.ones(4, device=device)]
    child = context.Process(target=in_fork, args=(kept, queue))
    child.start()
    assert "Use the 'spawn' start method" in queue.get()
    child.join(20)
    assert child.exitcode == 0
    assert torch.ones(1, device=device).item() == 1


def test_process_ends_with_copies_queued(device):
    run("""
        sim.configure(mode="threads", h2d_gbps=0.1)
        there, side = torch.empty(1 << 20, device=device), torch.Stream(device)
        with side:
            for _ in range(5):
                there.copy_(torch.ones(1 << 20).pin_memory(), non_blocking=True)
        sim.spin(0.05)
    """)


def test_process_ends_with_registered_memory_and_events(device):
    run("""
        sim.configure(mode="threads", d2h_gbps=0.1)
        host = torch.ones(1 << 20)
        torch.sim.host_register(host.data_ptr(), 4 << 20)
        host.copy_(torch.ones(1 << 20, device=device), non_blocking=True)
        event = torch.Event(device)
        event.record()
        torch.sim.current_stream().wait_event(event)
    """)


def test_current_stream_and_device_are_a_threads_own(device):
    side, seen = torch.Stream(device), []

    def body():
        seen.append((torch.sim.current_stream() == torch.sim.default_stream(), torch.sim.current_device()))
        torch.sim.set_device(1)
        seen.append(torch.ones(2, device="sim").sum().item())

    with side:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert torch.sim.current_stream() == side
    assert seen == [(True, 0), 2.0]
    assert torch.sim.current_device() == 0


def test_threads_may_compute_at_once(device):
    sim.configure(mode="threads")
    results = []

    def body(value):
        with torch.Stream(device):
            x = torch.full((1000,), value).pin_memory()
            for _ in range(50):
                y = x.to(device, non_blocking=True) * 2
            results.append(y.cpu().sum().item())

    threads = [threading.Thread(target=body, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0.0, 2000.0, 4000.0, 6000.0]
    assert sim.races() == []


def test_the_collector_may_free_device_memory_while_records_are_read(device):
    """Records become Python objects in which the collector may run, and what it frees takes the accelerator's lock."""
    out = run("""
        import gc

        class Cycle:
            def __init__(self):
                self.me, self.tensor = self, torch.ones(1, device=device)

        def read(reader):
            Cycle()
            gc.set_threshold(100)  # fewer than there are rows
            rows = reader()
            gc.set_threshold(0)
            return rows

        sim.configure(mode="virtual", races="record")
        there, side = torch.empty(1, device=device), torch.Stream(device)
        gc.set_threshold(0)
        gc.collect()
        with sim.trace() as spans:
            for _ in range(200):
                with side:
                    there.fill_(1)
                there.fill_(0)
            Cycle()
            gc.set_threshold(100)
        gc.set_threshold(0)
        print(len(spans) > 200, len(read(sim.races)) > 200, gc.collect())
    """)
    assert out == "True True 0\n"
