"""Two processes that stream the blocks of one checkpoint: what its weights take of the host's memory, all together.

Each is forked before anything is on the device, so that what they import counts once. What is measured is the proportional set size: a
page that two processes share counts half for each.
"""

import gc
import json
import os
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from omni_offload import LayerOptions, OffloadConfig, OffloadPlan, OffloadStrategy, OmniOffloadMixin, get_offload_backend
from omni_offload.backends import manage
from omni_offload.residency.checkpoint import remember_files
from omni_offload.testing import sim

WIDTH, DEPTH = 1024, 32
MIB = 1 << 20


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Pipe(OmniOffloadMixin):
    _dit_modules = ["transformer"]
    _encoder_modules = []
    _vae_modules = []
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

    def __init__(self, path):
        with torch.device("meta"):
            self.transformer = Transformer()
        tensors = load_file(path)
        self.transformer.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)  # memory of its own
        self.transformer.requires_grad_(requires_grad=False)
        remember_files(self.transformer, [path])

    def __call__(self, x):
        return self.transformer(x)


def pss(path=None):
    """The proportional set size of this process, or of its mappings of one file (bytes)."""
    total, counts = 0, path is None
    for line in Path("/proc/self/smaps_rollup" if path is None else "/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            counts = path is None or rest[-1:] == [str(path)]
        elif name == "Pss:" and counts:
            total += int(rest[0]) * 1024
    return total


def stream(path, transfer, barrier, send):
    """Enable, call, and measure while the other process has come as far."""
    device = sim.install()
    x = torch.full((1, WIDTH), 0.5)
    options = {"dit": LayerOptions(weight_transfer=transfer)} if transfer else {}
    strategy = OffloadStrategy.DISTRIBUTED_LAYERWISE if transfer else OffloadStrategy.LAYERWISE
    config = OffloadConfig(strategy=strategy, layer_options=options, host_memory=160 * MIB)
    pipe = Pipe(path)
    with manage(pipe, get_offload_backend(config, device)):  # what whoever does it once takes
        pipe(x)
    del pipe
    gc.collect()
    barrier.wait(60)
    before = pss()
    barrier.wait(60)
    pipe = Pipe(path)
    want = pipe(x)
    backend = manage(pipe, get_offload_backend(config, device))
    equal = all(torch.equal(pipe(x).cpu(), want) for _ in range(2))
    barrier.wait(60)
    grown, mapped = pss() - before, pss(path)
    pinned = backend.report().pinned_host_bytes
    barrier.wait(60)
    backend.disable()
    send.send({"grown": grown, "file": mapped, "pinned": pinned, "equal": equal and torch.equal(pipe(x), want), "races": len(sim.races())})


def measure(transfer):
    torch.set_num_threads(1)
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        torch.manual_seed(0)
        save_file(Transformer().state_dict(), path)
        barrier = context.Barrier(2)
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [context.Process(target=stream, args=(path, transfer, barrier, send)) for _, send in pipes]
        try:
            for rank in ranks:
                rank.start()
            for _, send in pipes:
                send.close()  # so that a process that ends is noticed
            found = [receive.recv() for receive, _ in pipes]
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()
        return {"weights": path.stat().st_size, "ranks": found}


sys.stdout.write(json.dumps({name: measure(transfer) for name, transfer in (("mapped", "rank-local"), ("own", None))}))
sys.stdout.flush()
os._exit(0)
