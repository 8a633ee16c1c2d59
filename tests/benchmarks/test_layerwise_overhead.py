"""The benchmark of the host's overhead measures what it says; the script itself is the gate."""

import gc

import layerwise_overhead
import torch

from omni_offload.testing import sim


def test_it_measures_both_and_leaves_nothing():
    device = sim.install()
    before = sim.allocated(), sim.pinned_bytes()
    times = layerwise_overhead.measure(torch.device("sim"), rounds=1, steps=3)
    assert set(times) == {"ours", "theirs"}
    assert all(value > 0 for value in times.values())
    gc.collect()  # their hooks and modules refer to one another
    torch.accelerator.synchronize(device)
    assert (sim.allocated(), sim.pinned_bytes()) == before
