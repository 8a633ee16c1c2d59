"""Gathers that are the device's own, as NCCL's are: the host waits for none, and what runs when is a matter of events alone."""

import pytest
import torch
from rank_threads import GATHER, Ranks, makes, same

from omni_offload.backends import gathering
from omni_offload.testing import sim


@pytest.fixture(scope="module")
def make(kit):
    """Make the pipeline; every rank makes its own, with equal weights."""
    return makes(kit)


@pytest.fixture
def ranks(device, monkeypatch):
    """Two ranks, whose gathers are taken for the device's."""
    monkeypatch.setattr(gathering, "backend_of_group", lambda *_: "of the device")
    return Ranks(2, monkeypatch)


@pytest.mark.parametrize("mode", ["threads", "virtual"])
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 0, 0, 3], [2]], ids=str)
def test_call(make, ranks, x, mode, slots, order):
    """Outputs are a resident run's, and nothing races, in any order of blocks, where copies and gathers take longer than kernels."""
    plain = make()
    plain.transformer.order = order
    with torch.no_grad():
        expected = plain(x)

    def rank(_, device):
        pipe = make()
        pipe.transformer.order = order
        with pipe.enable_omni_offload("layer", device=device, slots=slots, **GATHER):
            for _ in range(2):
                assert torch.equal(pipe(x.to(device)).cpu(), expected)
        assert same(pipe, plain)

    with sim.settings(mode=mode, h2d_gbps=0.02, collective_gbps=0.02, races="record"):
        ranks.all(rank)
        assert sim.races() == []
