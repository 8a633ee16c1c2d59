"""Which parameters FSDP2 has taken: the places, whatever stands in them. The world has one rank, whose collectives are real."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from omni_offload.discovery import flat_fsdp_modules, fsdp_parameters, left_to_fsdp, look_for_fsdp, managed_weights_of
from omni_offload.plan import weight_bytes
from omni_offload.residency.tables import collect


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("nothing", None)
        self.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.third(self.second(self.first(x))) * self.scale


@pytest.fixture
def mesh():
    """A mesh of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


TAKEN = ["m.first.bias", "m.first.weight", "m.second.bias", "m.second.weight"]


def test_places_are_known_while_whole_parameters_stand_in_them(mesh):
    """Shared ones by every place; tables do not count as changed by what FSDP2 puts there, and do by others."""
    module = Net()
    kept = {*module.third.parameters()}
    fully_shard(module, mesh=mesh, ignored_params=kept)
    entries, tables = collect({"m": module})
    assert {entry.name for entry in entries} == {"m.third.weight", "m.third.bias", "m.scale"}
    for _ in range(2):
        assert sorted(name for name, _ in fsdp_parameters(module, "m")) == TAKEN
        assert {id(tensor) for tensor in managed_weights_of(module)} == {id(tensor) for tensor in (*kept, module.scale)}
        assert weight_bytes(module) == 4 * (16 + 4 + 4)
        assert not tables.changed()
        module(torch.ones(1, 4))
        assert not isinstance(module.first.weight, DTensor)
    module.reshard()
    assert isinstance(module.first.weight, DTensor)
    assert not tables.changed()
    module.third.bias = nn.Parameter(torch.ones(4), requires_grad=False)
    assert tables.changed()


def test_what_was_taken_out_is_not_named(mesh):
    """A place that is empty has nothing in it."""
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh)
    look_for_fsdp(module)
    module.bias = None
    assert [name for name, _ in fsdp_parameters(module, "m")] == ["m.weight"]


def test_without_fsdp_nothing_is_taken(mesh, monkeypatch):
    """Nobody has sharded anything while FSDP2 was not imported, and it is not imported to look."""
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh)
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    look_for_fsdp(module)
    assert left_to_fsdp(module) == frozenset()
    assert [*flat_fsdp_modules(module, "m")] == []


@pytest.mark.parametrize("empty", [False, True])
def test_the_state_of_an_older_torch(mesh, monkeypatch, empty):
    """It has one group of parameters, or none."""
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh)
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    state = types.SimpleNamespace(_fsdp_param_group=None if empty else group)
    monkeypatch.setattr(FSDPModule, "_get_fsdp_state", lambda _: state)
    look_for_fsdp(module)
    assert left_to_fsdp(module) == (frozenset() if empty else {"weight", "bias"})
