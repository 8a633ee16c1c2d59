"""Distributed layerwise offload where nothing is gathered, and what is refused before anything is touched."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_offload import (
    DiffusionParallelConfig,
    DLOTransfer,
    LayerOptions,
    OffloadConfig,
    OffloadPlan,
    OffloadStrategy,
    get_offload_backend,
    resolve_offload_plan,
)
from omni_offload.backends import distributed_layerwise, manage
from omni_offload.errors import OffloadConfigError, OffloadStateError


@pytest.fixture(scope="module")
def make(kit):
    """Make a pipeline whose DiT and text encoder have blocks."""

    return kit.Streaming


def config(transfer="allgather", *, size=1, **fields):
    options = {"dit": LayerOptions(weight_transfer=DLOTransfer(transfer))}
    parallel = DiffusionParallelConfig(data_parallel_size=size)
    return OffloadConfig(
        strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE, **({"layer_options": options, "parallel_config": parallel} | fields)
    )


@pytest.fixture
def alone(monkeypatch):
    """No communicator is made."""

    def refuse(*_, **__):
        raise AssertionError("a communicator was made")

    monkeypatch.setattr("omni_offload.backends.gathering.current_world", refuse)


@pytest.mark.parametrize("asked", [config(), config("rank-local"), config("rank-local", size=4)], ids=["alone", "rank-local", "of four"])
def test_blocks_stream_from_this_rank_alone(make, device, x, expected, alone, asked):
    """A rank that is alone, and blocks that travel rank-locally, need no process group; the output is a resident run's."""
    pipe = make()
    with manage(pipe, get_offload_backend(asked, device)) as backend, torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), expected)
        assert {part.name: part.treatment for part in backend.report().components}["transformer"] == "stream"
        with backend.writing("transformer"):
            pipe.transformer.pos_embed.add_(0)
    assert torch.equal(pipe(x), expected)
    backend.shutdown()


def test_many_ranks_without_a_world(make, device, kit):
    """Sizes of more than one rank need an initialised world; nothing is touched."""
    pipe = make()
    with pytest.raises(OffloadConfigError, match=r"init_process_group\(\) first"):
        manage(pipe, get_offload_backend(config(size=2), device))
    assert kit.hooks(pipe) == []
    assert pipe.offload_backend is None


def test_asking_again(make, device, x):
    """Asked for the same, the backend that is there is returned; with another mesh it is not the same."""
    pipe = make()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with manage(pipe, get_offload_backend(config(), device, mesh=mesh)) as backend:
            assert manage(pipe, get_offload_backend(config(), device, mesh=mesh)) is backend
            backend.enable(pipe)
            with pytest.raises(OffloadStateError, match="was asked for"):
                manage(pipe, get_offload_backend(config(), device))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("fields", "replicated", "asks"),
    [
        ({}, (), True),
        ({"components": {"text_encoder"}, "layer_options": {}}, (), False),
        ({"components": {"text_encoder"}, "layer_options": {}}, ("text_encoder",), True),
        ({"layer_options": {}, "dlo_use_allgather": False}, ("text_encoder",), False),
        ({"layer_options": {"dit": LayerOptions(weight_transfer=DLOTransfer.RANK_LOCAL)}}, (), False),
    ],
)
def test_who_is_asked_to_come(make, device, monkeypatch, fields, replicated, asks):
    """Other ranks are waited for only where blocks are to be gathered: of DiTs, and of encoders that are declared to be equal."""

    class AskedError(Exception):
        pass

    def ask(*_, **__):
        raise AskedError

    monkeypatch.setattr(distributed_layerwise, "gather_ranks", ask)
    pipe = make()
    pipe.text_encoder.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    pipe._offload_plan = OffloadPlan(
        block_attrs={"transformer": ("blocks",)},
        encoder_block_attrs={"text_encoder": ("layers",)},
        encoder_dlo_weight_replication=frozenset(replicated),
    )
    asked = config(**fields)
    for plan in (None, resolve_offload_plan(pipe, asked)):
        backend = distributed_layerwise.DistributedLayerwiseOffloadBackend(asked, device, plan=plan)
        try:
            backend.enable(pipe)
        except AskedError:
            assert asks
        else:
            assert not asks
            backend.disable()


def test_an_undeclared_pipeline_is_not_asked_for_its_plan(kit, device, x, expected):
    """Without a plan of its own, blocks are found by their names."""
    pipe = kit.Pipe()
    with pytest.warns(DeprecationWarning, match="declares no blocks"):
        manage(pipe, get_offload_backend(config(), device)).disable()
