"""The benchmark of bindings measures what it says; its figures are nobody's gate."""

import binding
import torch

from omni_offload.testing import sim


def test_it_measures_every_kind_of_work_and_leaves_nothing():
    device = sim.install()
    before = sim.allocated(), sim.pinned_bytes()
    times = binding.measure(torch.device("sim"), rounds=2)
    assert set(times) == {"bare", "bind", "use"}
    assert all(value > 0 for value in times.values())
    torch.accelerator.synchronize(device)
    assert (sim.allocated(), sim.pinned_bytes()) == before
