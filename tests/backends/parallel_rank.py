"""What a rank does beside other owners of weights: FSDP2, and diffusers' tensor and context parallelism.

Run by gathered_rank. Each scenario compares with a run of the same pipeline, parallel in the
same way, whose weights all stay on the device.
"""

import torch
from diffusers import ContextParallelConfig
from diffusers.hooks import tensor_parallel
from diffusers.models._modeling_parallel import TensorParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from omni_offload import (
    DiffusionParallelConfig,
    DLOTransfer,
    LayerOptions,
    OffloadConfig,
    OffloadStrategy,
    get_offload_backend,
    streamed_parameters,
)
from omni_offload.backends import manage
from omni_offload.testing import sim
from pipelines.flux.cases import FLUX

PARTS = ("text_encoder", "text_encoder_2", "transformer", "vae")


def configured(transfer, **parallel):
    return OffloadConfig(
        strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE,
        layer_options={"dit": LayerOptions(weight_transfer=DLOTransfer(transfer), resident_layers=1)},
        parallel_config=DiffusionParallelConfig(**parallel),
    )


def call(pipe):
    with torch.no_grad():
        return [output.cpu() for output in FLUX.outputs(pipe(**FLUX.make_inputs(pipe)))]


def run(pipe, want, config, mesh, device):
    """Enable, call twice, disable, and once more: outputs are the resident run's, weights the same objects with the same bits."""
    blocks = [block for stack in ("transformer_blocks", "single_transformer_blocks") for block in getattr(pipe.transformer, stack)]
    before = {p: local(p).clone().cpu() for block in blocks for p in block.parameters()}
    for _ in range(2):
        backend = get_offload_backend(config, device, mesh=mesh)
        manage(pipe, backend)
        gathered = [residency for _, residency in backend._rotation.gathered] if backend._gathering else []
        ranks = backend._gathering.size if backend._gathering else 1
        whole = sum(block.host_bytes for one in gathered for block in one.ring.blocks.values())
        held = sum(shard.nbytes for one in gathered for _, shard in one.shards)
        assert held <= whole / ranks * 1.03, (held, whole, ranks)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(call(pipe), want, strict=True)), "other outputs"
        report = backend.report()
        backend.disable()
    assert [*before] == [p for block in blocks for p in block.parameters()]
    assert all(torch.equal(local(p), was) and p.device.type == "cpu" for p, was in before.items())
    assert sim.pinned_bytes() == 0
    assert sim.races() == [], sim.races()[:3]
    return {"ranks": ranks, "held": held, "whole": whole, "treated": {part.name: part.treatment for part in report.components}}


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def resident(make, device):
    """Return the outputs of a pipeline that stays on the device."""
    pipe = make()
    for part in PARTS:
        getattr(pipe, part).to(device)
    type(pipe)._execution_device, was = property(lambda _: device), type(pipe)._execution_device
    try:
        return call(pipe)
    finally:
        type(pipe)._execution_device = was


def hsdp(size, device):
    """FSDP2 owns all but the streamed blocks: the transformer's are gathered over the shard axis, the encoders' come rank-locally."""
    replicate = 2 if size == 4 else 1
    mesh = init_device_mesh("sim", (replicate, 2), mesh_dim_names=("replicate", "shard"))
    want = resident(FLUX.make_pipeline, device)
    pipe = FLUX.make_pipeline()
    config = configured("allgather", use_hsdp=True, hsdp_replicate_size=replicate)
    ignored = streamed_parameters(pipe, config)
    sharded = [getattr(pipe, part) for part in PARTS if part != "vae"]
    for module in sharded:
        fully_shard(module, mesh=mesh, ignored_params={*ignored}, reshard_after_forward=module is not pipe.transformer)
    told = run(pipe, want, config, mesh, device)
    pipe.transformer.reshard()
    for module in sharded:
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor) is (parameter not in ignored), name
            assert parameter in ignored or parameter.device == device, name
    owned = [p for module in sharded for p in module.parameters() if p not in ignored]
    assert sum(local(p).numel() for p in owned) < 0.6 * sum(p.numel() for p in owned)
    return told


def tp(size, device):
    """diffusers shards the transformer over tensor-parallel ranks, which never gather with one another; data-parallel ones do."""
    tensor_parallel._SUPPORTED_TP_DEVICES = ("sim",)
    mesh = init_device_mesh("sim", (size // 2, 2), mesh_dim_names=("dp", "tp"))

    def make():
        pipe = FLUX.make_pipeline()
        pipe.transformer.to(device)
        pipe.transformer.enable_parallelism(config=TensorParallelConfig(mesh=mesh["tp"]))
        return pipe

    want = resident(make, device)
    pipe = make()
    spread = [p for p in pipe.transformer.transformer_blocks.parameters() if isinstance(p, DTensor)]
    assert sum(local(p).numel() for p in spread) < 0.6 * sum(p.numel() for p in spread)
    return run(pipe, want, configured("allgather", data_parallel_size=size // 2, tensor_parallel_size=2), mesh, device)


def sp(size, device):
    """diffusers splits sequences over two ranks: these gather the blocks, or with more of them those that do the same part do."""
    mesh = init_device_mesh("sim", (size // 2, 1, 2), mesh_dim_names=("dp", "ring", "ulysses"))

    def make():
        pipe = FLUX.make_pipeline()
        pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh["ring", "ulysses"]))
        return pipe

    want = resident(make, device)
    return run(make(), want, configured("allgather", data_parallel_size=size // 2, sequence_parallel_size=2), None, device)


SCENARIOS = {"hsdp": hsdp, "tp": tp, "sp": sp}
