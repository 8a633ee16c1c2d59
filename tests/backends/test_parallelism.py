"""Offload beside other owners of weights: FSDP2 has the rest of a component, tensor parallelism has each rank's part of it.

The worlds are of one rank here, whose collectives are real; tests/backends/test_parallel_processes.py has more ranks.
"""

import gc
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_offload import (
    DiffusionParallelConfig,
    DLOTransfer,
    LayerOptions,
    OffloadConfig,
    OffloadStrategy,
    get_offload_backend,
    resolve_offload_plan,
    streamed_parameters,
)
from omni_offload.backends import manage
from omni_offload.backends.spread import refuse_spread_blocks
from omni_offload.errors import OffloadConfigError


@pytest.fixture(scope="module")
def make(kit):
    """Make a pipeline whose DiT has blocks."""

    return kit.Streaming


@pytest.fixture
def world(device):
    """A world of one rank, with collectives on the device."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("sim", (1, 1), mesh_dim_names=("replicate", "shard"))
    gc.collect()  # before the world goes: sharded modules hold its groups
    dist.destroy_process_group()


@pytest.fixture
def fake_world():
    """A world of four ranks of which only this one is there."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def config(strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE, *, transfer="allgather", **parallel):
    distributed = strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE
    options = {"dit": LayerOptions(weight_transfer=DLOTransfer(transfer))} if distributed else {}
    return OffloadConfig(strategy=strategy, layer_options=options, parallel_config=DiffusionParallelConfig(**parallel))


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [config(use_hsdp=True), config(OffloadStrategy.LAYERWISE)], ids=["distributed", "layerwise"])
@pytest.mark.parametrize("options", [{"reshard_after_forward": True}, {}], ids=["resharding", "staying whole"])
def test_fsdp_owns_all_but_the_streamed_blocks(make, device, x, expected, world, asked, options):
    """Outputs are a resident run's; FSDP2's weights are never moved by the offload, and stand in no table of it."""
    pipe = make()
    transformer, encoder = pipe.transformer, pipe.text_encoder
    blocks = {*transformer.blocks.parameters()}
    ignored = streamed_parameters(pipe, asked)
    assert ignored == blocks
    fully_shard(transformer, mesh=world, ignored_params={*ignored}, **options)
    fully_shard(encoder, mesh=world, **options)
    with torch.no_grad():
        encoder(x.to(device))  # whole parameters stand in their places now, unless it reshards
    with manage(pipe, get_offload_backend(asked, device)) as backend, torch.no_grad():
        parts = {part.name: part for part in backend.report().components}
        assert parts["transformer"].weight_bytes == sum(parameter.nbytes for parameter in blocks)
        assert parts["text_encoder"].weight_bytes == encoder.scale.nbytes
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), expected)
            assert all(parameter.device.type == "cpu" for parameter in blocks)
        assert transformer.pos_embed.device == device  # FSDP2's
    for module in (transformer, encoder):
        module.reshard()
        owned = [parameter for parameter in module.parameters() if parameter not in blocks]
        assert owned
        assert all(isinstance(parameter, DTensor) and parameter.device == device for parameter in owned)
    assert blocks == {*transformer.blocks.parameters()}


def test_fsdp_keeps_its_weights_on_the_host(make, device, x, expected, world):
    """FSDP2's own policy for the host works beside the offload."""
    pipe, asked = make(), config(use_hsdp=True)
    ignored = streamed_parameters(pipe, asked)  # as a message of a refusal says it
    fully_shard(pipe.transformer, mesh=world, ignored_params=ignored, reshard_after_forward=True, offload_policy=CPUOffloadPolicy())
    with manage(pipe, get_offload_backend(asked, device)), torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), expected)
        assert pipe.transformer.pos_embed.device.type == "cpu"


def test_a_call_that_fails_beside_fsdp(make, device, x, expected, world):
    """It leaves whole parameters in FSDP2's places, which the next call does not take for weights of the offload."""
    pipe, asked = make(), config(use_hsdp=True)
    fully_shard(pipe.transformer, mesh=world, ignored_params=streamed_parameters(pipe, asked), reshard_after_forward=True)
    blocks = {*pipe.transformer.blocks.parameters()}
    failing = pipe.transformer.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with manage(pipe, get_offload_backend(asked, device)), torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            pipe(x)
        assert not isinstance(pipe.transformer.pos_embed, DTensor)
        assert all(parameter.device.type == "cpu" for parameter in blocks)
        failing.remove()
        assert torch.equal(pipe(x).cpu(), expected)
    assert pipe.transformer.pos_embed.device == device
    assert {parameter for parameter in pipe.transformer.parameters() if parameter.device.type == "cpu"} == blocks


@pytest.mark.parametrize("components", [None, {"dit"}], ids=["selected", "unselected"])
@pytest.mark.parametrize("registered_first", [True, False])
def test_components_that_are_all_fsdps(make, device, x, expected, world, components, registered_first):
    """Whether selected or not they are left alone, methods that FSDP2 is told of too; those that hold nothing else are in no report."""
    pipe, asked = make(), OffloadConfig(strategy=OffloadStrategy.LAYERWISE, components=components)
    for module in (pipe.text_encoder, pipe.vae):
        fully_shard(module, mesh=world, reshard_after_forward=True)
    if registered_first:
        register_fsdp_forward_method(pipe.vae, "decode")
    with manage(pipe, get_offload_backend(asked, device)) as backend, torch.no_grad():
        if not registered_first:
            register_fsdp_forward_method(pipe.vae, "decode")
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), expected)
        assert {part.name for part in backend.report().components} == {"text_encoder", "transformer"}
    assert all(isinstance(p, DTensor) and p.device == device for module in (pipe.text_encoder, pipe.vae) for p in module.parameters())


def test_shared_and_resting_weights_in_blocks_are_fsdps(make, device, x, world):
    """What blocks share, and what `rest_submodules` names, lives in the rest: FSDP2 may own it."""
    pipe, plain, asked = make(), make(), config(use_hsdp=True)
    for one in (pipe, plain):
        one.transformer.blocks[1].weight = one.transformer.blocks[0].weight
    with torch.no_grad():
        want = plain(x)
    ignored = streamed_parameters(pipe, asked)
    assert pipe.transformer.blocks[0].weight not in ignored
    fully_shard(pipe.transformer, mesh=world, ignored_params={*ignored}, reshard_after_forward=True)
    with manage(pipe, get_offload_backend(asked, device)), torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), want)
        assert isinstance(pipe.transformer.blocks[1].weight, DTensor)
        assert pipe.transformer.blocks[1].weight is pipe.transformer.blocks[0].weight


@pytest.mark.parametrize("strategy", [OffloadStrategy.LAYERWISE, OffloadStrategy.DISTRIBUTED_LAYERWISE])
@pytest.mark.parametrize("whole", [True, False], ids=["the component", "a block"])
def test_blocks_that_fsdp_has_taken_are_refused(make, kit, device, x, world, strategy, whole):
    """They are refused by name, also while whole parameters stand in their places; nothing is touched."""
    pipe = make()
    taken = pipe.transformer if whole else pipe.transformer.blocks[1]
    fully_shard(taken, mesh=world)
    with torch.no_grad():
        taken(x.to(device))
    assert isinstance(taken, FSDPModule)
    with pytest.raises(OffloadConfigError, match=r"taken transformer\.blocks\.\d\.weight and \d more, of blocks.*streamed_parameters"):
        manage(pipe, get_offload_backend(config(strategy, use_hsdp=True), device))
    assert kit.hooks(pipe) == []


def test_components_that_fsdp_has_taken_are_refused_at_model_level(make, kit, device, world):
    """Nothing of them could be moved: refused by name where they were to rotate; unselected ones are left to FSDP2."""
    pipe = make()
    fully_shard(pipe.text_encoder, mesh=world)
    with pytest.raises(
        OffloadConfigError, match=r"'text_encoder' is to rotate.*taken text_encoder\.proj\.weight and 3 more; use mode 'layer'"
    ):
        manage(pipe, get_offload_backend(config(OffloadStrategy.MODEL_LEVEL), device))
    with pytest.raises(OffloadConfigError, match=r"use_hsdp is True.*; use mode 'layer'"):
        manage(pipe, get_offload_backend(config(OffloadStrategy.MODEL_LEVEL, use_hsdp=True), device))
    assert kit.hooks(pipe) == []
    asked = OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL, components={"dit", "vae"})
    with manage(pipe, get_offload_backend(asked, device)) as backend:
        assert {part.name: part.treatment for part in backend.report().components}["transformer"] == "rotate"


@pytest.mark.parametrize("strategy", [OffloadStrategy.MODEL_LEVEL, OffloadStrategy.LAYERWISE])
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:FutureWarning", "ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_modules_of_fsdp1_are_refused(make, kit, device, world, strategy):
    """Their weights are views of one flat parameter that FSDP1 moves: refused by name in what is to move, and left alone elsewhere."""
    pipe = make()
    pipe.text_encoder.proj = FullyShardedDataParallel(pipe.text_encoder.proj, device_id=torch.device("cpu"))
    with pytest.raises(OffloadConfigError, match=r"taken text_encoder\.proj, which is to move; use fully_shard \(FSDP2\)"):
        manage(pipe, get_offload_backend(config(strategy), device))
    assert kit.hooks(pipe) == []


# ---- tensor parallelism ----------------------------------------------------------------------------------------------------


def test_without_distributed_tensors_nothing_is_spread(make, monkeypatch):
    """They are not imported to look for them."""
    pipe = make()
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    refuse_spread_blocks(pipe, resolve_offload_plan(pipe, config()), None)


def spread(module, mesh, placements):
    """Distribute a module's weight."""
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, placements), requires_grad=False)


@pytest.mark.parametrize("strategy", [OffloadStrategy.MODEL_LEVEL, OffloadStrategy.LAYERWISE, OffloadStrategy.DISTRIBUTED_LAYERWISE])
def test_distributed_weights_are_moved_by_their_local_tensors(make, device, x, world, strategy):
    """In blocks, in the rest of a component and in one that rotates; the objects stay, and are on the host after a call."""
    pipe, mesh = make(), init_device_mesh("sim", (1,), mesh_dim_names=("tp",))
    layers = [*pipe.transformer.blocks, pipe.text_encoder.proj, pipe.vae.dec]
    pipe.transformer.register_parameter("scale", nn.Parameter(torch.ones(64), requires_grad=False))
    with torch.no_grad():
        expected = pipe(x)
        for layer in layers:
            layer.bias = None
        expected = pipe(x)
    for layer in layers:
        spread(layer, mesh, [Shard(0)])
        layer.register_forward_pre_hook(lambda module, args: DTensor.from_local(args[0], module.weight.device_mesh, [Replicate()]))
        layer.register_forward_hook(lambda _module, _args, output: output.full_tensor())
    weights = [layer.weight for layer in layers]
    before = [weight.to_local().clone().cpu() for weight in weights]
    assert {weight.device.type for weight in weights} == {"sim"}
    with manage(pipe, get_offload_backend(config(strategy), device)), torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), expected)
            assert {weight.device.type for weight in weights} == {weight.to_local().device.type for weight in weights} == {"cpu"}
    assert all(layer.weight is weight for layer, weight in zip(layers, weights, strict=True))
    assert all(torch.equal(weight.to_local(), was) for weight, was in zip(weights, before, strict=True))


@pytest.mark.parametrize(
    ("parallel", "placements", "ranks"),
    [
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, [Replicate(), Shard(0)], None),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, [Shard(0), Replicate()], "1, 3"),
        ({"data_parallel_size": 4}, [Replicate(), Shard(1)], "0, 1"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, [Shard(0), Shard(1)], "0, 1, 3"),
        ({"use_hsdp": True}, [Replicate(), Shard(0)], "0, 1"),
    ],
)
@pytest.mark.parametrize("by_mesh", [True, False], ids=["by the mesh", "by rank"])
def test_blocks_distributed_over_others_than_tensor_parallel_ranks_are_refused(
    make, kit, device, fake_world, parallel, placements, ranks, by_mesh
):
    """What other ranks are to gather would be other weights; named with the ranks, before anything is touched."""
    pipe = make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard" if "use_hsdp" in parallel else "dp", "tp"))
    given = mesh if by_mesh and "tensor_parallel_size" in parallel else None
    asked = config(transfer="rank-local", **parallel)
    spread(pipe.transformer.blocks[1], mesh, placements)
    backend = get_offload_backend(asked, device, mesh=given)
    if ranks is None:
        manage(pipe, backend).disable()
        return
    with pytest.raises(
        OffloadConfigError, match=rf"1 weights .* transformer\.blocks\.1\.weight over ranks {ranks}; .*tensor_parallel_size"
    ):
        manage(pipe, backend)
    assert kit.hooks(pipe) == []
