"""The table of what is refused: each line of it is what code refuses with, and what a message ends with."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import omni_offload
from omni_offload import DiffusionParallelConfig, OffloadConfig, OffloadPlan, refusals, resolve_offload_plan
from omni_offload.errors import OffloadConfigError
from omni_offload.ranks import gather_ranks
from omni_offload.refusals import REFUSALS, Refusal

SOURCES = sorted(Path(omni_offload.__file__).parent.rglob("*.py"))
NAMES = {name: value for name, value in vars(refusals).items() if isinstance(value, Refusal)}


def test_the_table_has_every_refusal_once():
    """None is left out of the documentation."""
    assert [*NAMES.values()] == [*REFUSALS]
    assert len({refusal.request for refusal in REFUSALS}) == len(REFUSALS)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_what_code_refuses_with(name):
    """A line that nothing refuses with any more is taken out."""
    assert any(re.search(rf"\b{name}\.of\(", source.read_text(encoding="utf-8")) for source in SOURCES)


@pytest.fixture
def world():
    """A world of four ranks of which only this one is there."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def ranks(mesh=None, **sizes):
    gather_ranks(DiffusionParallelConfig(**sizes), mesh=mesh)


PARALLEL = {
    "HSDP_BESIDE_OTHERS": lambda: ranks(use_hsdp=True, tensor_parallel_size=2),
    "OTHER_WORLD": lambda: ranks(data_parallel_size=3),
    "OTHER_MESH": lambda: ranks(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), data_parallel_size=2),
    "NAMELESS_MESH": lambda: ranks(init_device_mesh("cpu", (4,)), data_parallel_size=4),
    "OUTSIDE_MESH": lambda: ranks(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), data_parallel_size=2),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_layouts_of_ranks(world, name):
    """The message ends with what to do, as it stands in the table."""
    with pytest.raises(OffloadConfigError) as caught:
        PARALLEL[name]()
    assert str(caught.value).endswith("; " + NAMES[name].instead.replace("`", ""))


def test_no_world():
    """Sizes of more than one rank need a world."""
    with pytest.raises(OffloadConfigError, match=r"; call init_process_group\(\) first$"):
        ranks(sequence_parallel_size=2)


class Encoding:
    """A pipeline with a text encoder whose layers may stream."""

    _dit_modules, _encoder_modules, _vae_modules = (), ("text_encoder",), ()
    _offload_plan = OffloadPlan(encoder_block_attrs={"text_encoder": ("layers",)})

    def __init__(self):
        self.text_encoder = torch.nn.Module()
        self.text_encoder.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))


def test_an_encoder_that_is_not_declared_to_be_equal():
    """It is not gathered by request where nobody says that it may be."""
    options = {"text_encoder": omni_offload.LayerOptions(weight_transfer="allgather")}
    config = OffloadConfig(strategy="distributed_layerwise", layer_options=options, components={"text_encoder"})
    with pytest.raises(OffloadConfigError, match=r"'text_encoder' has equal .*; name it in encoder_dlo_weight_replication, or use"):
        resolve_offload_plan(Encoding(), config)
