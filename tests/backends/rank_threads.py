"""Ranks that are threads of one process, each with a device of its own; their groups are real ones (gloo). And what they run."""

import contextlib
import datetime as dt
import threading

import torch
import torch.distributed as dist
from torch import nn

from omni_offload.backends import base, distributed_layerwise, gathering
from omni_offload.backends.communicators import World
from omni_offload.backends.distributed_layerwise import DistributedLayerwiseOffloadBackend

GATHER = {"layer_options": {"dit": {"weight_transfer": "allgather"}}}


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.down.weight = nn.Parameter(torch.randn(2 * width, width).t())  # strides to keep
        self.up.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.fail = None

    def forward(self, x):
        x = x + torch.tanh(self.down(torch.relu(self.up(x)))) * self.up.scale[0]
        if self.fail is not None:
            raise self.fail
        return x


class Stack(nn.Module):
    def save_pretrained(self, folder):
        torch.save(self.state_dict(), folder)

    def __init__(self, depth=5, width=32):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.blocks[1].up.weight = self.blocks[0].up.weight  # in two blocks: the rest's
        self.blocks[2].twin = self.blocks[2].up.weight  # twice in one
        self.order = list(range(depth))

    def forward(self, x):
        x = self.embed(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x


def makes(kit):
    """Return what makes the pipeline: a text encoder, a DiT and a VAE, always with equal weights."""

    class Gathered(kit.Stacked):
        stack = Stack

    lock = threading.Lock()

    def make(*args, cls=Gathered, **kwargs):
        with lock:  # torch has one generator a process
            return cls(*args, **kwargs)

    make.cls = Gathered
    return make


class Ranks:
    """Runs what ranks do, and what they are to have in common.

    Args:
        size: How many there are.
        patch: Pytest's `monkeypatch`: in its place backends find these ranks.
    """

    def __init__(self, size, patch):
        self.size = size
        self.limit = dt.timedelta(seconds=20)
        self._local = threading.local()
        self.renew()
        patch.setattr(base, "_LOCK", contextlib.nullcontext())  # of one process: ranks enable together
        patch.setattr(gathering, "current_world", lambda: self.worlds[self._local.rank])
        patch.setattr(distributed_layerwise, "gather_ranks", lambda *_, **__: tuple(range(self.size)))
        patch.setattr(DistributedLayerwiseOffloadBackend, "time_limit", property(lambda _: self.limit))
        patch.setattr(DistributedLayerwiseOffloadBackend, "chunk_bytes", 4096)

    def renew(self):
        """Begin with no communicators, as new processes do. Those of before are destroyed, which nobody uses any more."""
        store = dist.HashStore()
        self.worlds = [World(rank, store, lambda _: "gloo") for rank in range(self.size)]

    def run(self, work, *, timeout=60):
        """Run `work(rank, device)` on every rank; returns what each returned or raised."""
        results = [None] * self.size

        def one(rank):
            self._local.rank = rank
            try:
                with torch.no_grad():
                    results[rank] = work(rank, torch.device("sim", rank))
            except BaseException as error:
                results[rank] = error.with_traceback(None)

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            assert not thread.is_alive(), "a rank hangs"
        return results

    def all(self, work):
        """As `run`, where no rank is to fail."""
        results = self.run(work)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def ring(backend):
    return backend._rotation.members["transformer"].owner.residency.ring


def kept(backend):
    """Host bytes that a rank keeps of streamed blocks."""
    return sum(held.nbytes for _, held in backend._rotation.members["transformer"].owner.residency.shards)


def same(pipe, plain):
    """Whether the DiT's weights are a plain pipeline's: bit for bit, whole, on the host, with their strides and ties."""
    own, other = (dict(one.transformer.named_parameters(remove_duplicate=False)) for one in (pipe, plain))
    ties = {n: [m for m, q in own.items() if q is p] for n, p in own.items()}
    return ties == {n: [m for m, q in other.items() if q is p] for n, p in other.items()} and all(
        torch.equal(p, other[n]) and p.stride() == other[n].stride() and p.device.type == "cpu" for n, p in own.items()
    )


def leftovers(pipe):
    """What stands in modules' `__dict__` that does not stand there as a rule."""
    names = {"forward", "state_dict", "_load_from_state_dict", "_apply", "__getstate__", "save_pretrained", "_omni_hook_registry"}
    return [
        (name, n)
        for c in ("text_encoder", "transformer", "vae")
        for name, m in getattr(pipe, c).named_modules()
        for n in names & {*m.__dict__}
    ]
