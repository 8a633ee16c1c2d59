"""Tiny real pipelines on the software accelerator; after each test nothing may be left on it, and no race."""

import gc
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.testing import sim


class Encoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x):
        return self.norm(self.proj(x)) * self.scale[0]


class Transformer(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.linspace(0, 1, width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x, cond=None):
        x = x + self.pos_embed
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x if cond is None else x + cond

    def embed(self, x):
        return x + self.pos_embed


class Vae(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.enc = nn.Linear(width, width)
        self.dec = nn.Linear(width, width)

    def encode(self, x):
        return self.enc(x)

    def decode(self, x):
        return torch.cat([self.tile(part) for part in x.split(1)])

    def tile(self, x):
        return self.forward(x)

    def forward(self, x):
        return self.dec(x)

    def lazily(self, x):
        return (self.dec(part) for part in x.split(1))


class Pipe(OmniOffloadMixin):
    """Encode, three denoising steps, decode."""

    _dit_modules = ["transformer"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]
    _offload_entry_points = {"vae": ("encode", "decode", "tile"), "text_encoder.norm": ("forward",), "": ("encode_prompt",)}

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.text_encoder = Encoder().requires_grad_(False)
        self.transformer = Transformer().requires_grad_(False)
        self.vae = Vae().requires_grad_(False)
        self.on_step = lambda _, x: x
        self.steps = 3

    def encode_prompt(self, x):
        return self.text_encoder(x)

    def __call__(self, x):
        x = self.encode_prompt(x)
        for step in range(self.steps):
            x = self.on_step(step, self.transformer(x, cond=x))
        return self.vae.decode(x)


class Streaming(Pipe):
    """The transformer has blocks."""

    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})


class Stacked(Streaming):
    """The transformer is what `stack` makes, half as wide as what is around it."""

    stack = None

    def __init__(self, *args, seed=0):
        super().__init__(seed)
        self.transformer = self.stack(*args).requires_grad_(False)

    def __call__(self, x):
        x = self.text_encoder(x)[:, :32]
        for step in range(self.steps):
            x = self.on_step(step, self.transformer(x))
        return self.vae.decode(torch.cat([x, x], dim=1))


class Pair(Pipe):
    """Two denoisers that alternate; the second sees what the first does."""

    _dit_modules = ["transformer", "transformer_2"]

    def __init__(self, seed=0):
        super().__init__(seed)
        self.transformer_2 = Transformer().requires_grad_(False)

    def __call__(self, x):
        x = self.text_encoder(x)
        for step in range(self.steps):
            x = self.on_step(step, self.transformer_2(self.transformer(x)))
        return self.vae.decode(x)


def padded(module):
    tensors = [*module.parameters(), *module.buffers()]
    return sum(-(-t.nbytes // 64) * 64 for t in tensors)


def where(pipe):
    """The components that have a tensor on the device now."""
    paths = [*pipe._encoder_modules, *pipe._dit_modules, *pipe._vae_modules, *pipe._resident_modules]
    modules = {path: getattr(pipe, path) for path in paths if getattr(pipe, path) is not None}
    return {path for path, m in modules.items() if any(t.device.type == "sim" for t in (*m.parameters(), *m.buffers()))}


def hooked(root):
    return [m for m in root.modules() if "_omni_hook_registry" in m.__dict__ or "forward" in m.__dict__]


def hooks(pipe):
    return [m for c in vars(pipe).values() if isinstance(c, nn.Module) for m in hooked(c)]


@pytest.fixture(scope="session")
def kit():
    """Classes and helpers."""
    return types.SimpleNamespace(
        Encoder=Encoder,
        Transformer=Transformer,
        Vae=Vae,
        Pipe=Pipe,
        Pair=Pair,
        Streaming=Streaming,
        Stacked=Stacked,
        padded=padded,
        where=where,
        hooked=hooked,
        hooks=hooks,
    )


@pytest.fixture
def pipe(device):
    """A pipeline of three components."""
    return Pipe()


@pytest.fixture
def x():
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def expected(x):
    """What a pipeline that is not offloaded makes."""
    return Pipe()(x)


@pytest.fixture(autouse=True)
def nothing_left(device):
    """Every test ends with an empty device, no pinned byte and no race (a test that failed before may have left some)."""
    gc.collect()
    before = sim.allocated(), sim.pinned_bytes()
    yield
    gc.collect()
    for index in range(2):
        torch.accelerator.synchronize(torch.device("sim", index))
    assert (sim.allocated(), sim.pinned_bytes()) == before
    assert sim.races() == []


@pytest.fixture
def whole(kit):
    """Check that nothing of the framework is left on a pipeline."""

    def check(pipe, x, expected):
        gc.collect()  # what an interrupt's traceback held
        assert pipe.offload_backend is None
        assert kit.where(pipe) == set()
        assert kit.hooks(pipe) == []
        assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)
        assert torch.equal(pipe(x), expected)

    return check
