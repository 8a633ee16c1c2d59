"""Resident blocks fill a budget: they are chosen anew when a component becomes larger or smaller, and share with what moves along."""

import re

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.testing import sim

WIDTH = 32


class Block(nn.Module):
    """One block, with or without an adapter."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapter = None

    def forward(self, x):
        y = torch.relu(self.up(x))
        return x + torch.tanh(self.down(y if self.adapter is None else y + self.adapter(y)))


class Stack(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def adapt(stack, width=2 * WIDTH):
    """Give every block an adapter, as large as a block's own layers."""
    for block in stack.blocks:
        block.adapter = nn.Sequential(nn.Linear(2 * WIDTH, width), nn.Linear(width, 2 * WIDTH)).requires_grad_(False)
        for parameter in block.adapter.parameters():
            parameter.fill_(0.01)


def no_adapter(stack):
    for block in stack.blocks:
        block.adapter = None


@pytest.fixture(scope="session")
def make(kit):
    """Make the streaming pipeline."""

    class Streaming(kit.Pipe):
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

        def __init__(self, seed=0):
            super().__init__(seed)
            self.transformer = Stack().requires_grad_(False)

        def __call__(self, x):
            x = self.text_encoder(x)[:, :WIDTH]
            for step in range(self.steps):
                x = self.on_step(step, self.transformer(x))
            return self.vae.decode(torch.cat([x, x], dim=1))

    return Streaming


@pytest.fixture(scope="session")
def make_two(make):
    """Make a pipeline of two streaming models that move together."""

    class Two(make):
        _dit_modules = ["transformer", "transformer_2"]
        _co_resident_modules = [("transformer", "transformer_2")]
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)})

        def __init__(self, seed=0):
            super().__init__(seed)
            self.transformer_2 = Stack().requires_grad_(False)

        def __call__(self, x):
            return super().__call__(torch.cat([self.transformer_2(x[:, :WIDTH]).to(x.device), x[:, WIDTH:]], dim=1))

    return Two


@pytest.fixture
def device(device):
    sim.configure(mode="virtual")
    return device


def least(pipe, device):
    """The least budget that is taken."""
    with pytest.raises(OffloadConfigError) as error:
        pipe.enable_omni_offload("layer", device=device, device_memory=64)
    return int(re.search(r"needs (\d+)", str(error.value))[1])


def residents(backend, name="transformer"):
    """How many blocks of a model do not stream now."""
    residency = backend._rotation.members[name].owner.residency
    return len(residency.blocks) - len(residency.ring.blocks)


def grown(make, device):
    """The least budget with the adapters, which leaves room for two residents without them."""
    pipe = make()
    with torch.no_grad():
        adapt(pipe.transformer)
    return least(pipe, device)


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_an_adapter_takes_the_room_of_residents(make, device, x, keep, pin_memory):
    """It is in force, within the budget, when blocks that were resident stream; once it is gone they are resident again."""
    plain, pipe, budget = make(), make(), grown(make, device)
    keys = {"device_memory": budget, "keep_between_calls": keep, "pin_memory": pin_memory}
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        before, pinned = residents(backend), sim.pinned_bytes()
        assert before > 1
        for one in (plain, pipe):
            adapt(one.transformer)
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert residents(backend) == 0
        for one in (plain, pipe):
            no_adapter(one.transformer)
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), plain(x))
        assert residents(backend) == before
        assert sim.pinned_bytes() == pinned
        assert backend.report().peak_device_bytes <= budget
    assert torch.equal(pipe(x), plain(x))


def test_an_adapter_within_a_call(make, device, x):
    """The residents are chosen anew in the middle of a call too, and blocks that stream from there on are hooked."""
    plain, pipe, budget = make(), make(), grown(make, device)
    with pipe.enable_omni_offload("layer", device=device, device_memory=budget) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        for one in (plain, pipe):
            one.on_step = lambda step, y, one=one: ((adapt, no_adapter, adapt)[step](one.transformer), y)[1]
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert backend.report().peak_device_bytes <= budget


def test_an_adapter_for_which_there_is_no_room(make, device, x):
    """It is refused by name; without it the pipeline goes on, with the residents that it had."""
    plain, pipe, budget = make(), make(), grown(make, device)
    with pipe.enable_omni_offload("layer", device=device, device_memory=budget) as backend, torch.no_grad():
        pipe(x)
        before = residents(backend)
        adapt(pipe.transformer, width=4 * WIDTH)
        with pytest.raises(OffloadStateError, match=r"transformer needs \d+ bytes"):
            pipe(x)
        no_adapter(pipe.transformer)
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert residents(backend) == before


def test_residents_that_were_asked_for_stay(make, device, x):
    """A number of residents is not changed behind the user's back: what has outgrown the budget with them is refused."""
    pipe, budget = make(), grown(make, device)
    options = {"dit": {"resident_layers": 2}}
    keys = {"device_memory": budget, "layer_options": options}
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        pipe(x)
        adapt(pipe.transformer)
        with pytest.raises(OffloadStateError, match=r"transformer needs \d+ bytes"):
            pipe(x)
        assert residents(backend) == 2


def test_every_budget_is_filled_and_kept(make, device):
    """From the least to that of all blocks: as many stay as fit beside the rest and the slots."""
    pipe = make()
    start, held = least(pipe, device), []
    size = sum(-(-parameter.nbytes // 64) * 64 for parameter in pipe.transformer.blocks[0].parameters())
    for budget in range(start, start + 3 * size, 1024):
        with pipe.enable_omni_offload("layer", device=device, device_memory=budget) as backend:
            taken = backend._rotation.members["transformer"].owner.residency.padded_bytes
            assert taken <= budget
            assert taken + size > budget or residents(backend) == len(pipe.transformer.blocks)
            held.append(taken)
    assert held == sorted(held)


def test_two_models_that_move_together_at_the_least(make_two, device, x):
    """The one with the smaller blocks leaves the other the slots that it needs to stream at all."""
    plain, pipe = make_two(), make_two()
    with torch.no_grad():
        for one in (plain, pipe):
            adapt(one.transformer_2)
    with pipe.enable_omni_offload("layer", device=device, device_memory=least(pipe, device)), torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))


def test_two_models_that_move_together_fit_the_least_budget(make_two, device, x):
    """What one keeps resident leaves the other its slots; with an adapter on one, the other gives up residents."""
    plain, pipe = make_two(), make_two()
    with torch.no_grad():
        adapt(pipe.transformer_2)
        budget = least(pipe, device)
        no_adapter(pipe.transformer_2)
    with pipe.enable_omni_offload("layer", device=device, device_memory=budget) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert residents(backend) > 0
        for one in (plain, pipe):
            adapt(one.transformer_2)
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert (residents(backend), residents(backend, "transformer_2")) == (0, 0)
        assert backend.report().peak_device_bytes <= budget


def test_an_adapter_within_a_use_of_what_moves_along(make_two, device):
    """A model that runs keeps its residents while those of one that moves with it are chosen anew; where all fit, all stay."""
    pipe, plain = make_two(), make_two()
    for one in (pipe, plain):
        stack, other = one.transformer, one.transformer_2

        def forward(y, stack=stack, other=other):
            if stack.blocks[0].adapter is None and other.blocks[0].adapter is None:
                adapt(other)
            return type(stack).forward(stack, other(y))

        stack.forward = forward
    y = torch.randn(2, WIDTH)
    with pipe.enable_omni_offload("layer", device=device, device_memory="4MiB") as backend, torch.no_grad():
        pipe.transformer_2(y)
        plain.transformer_2(y)
        for _ in range(2):
            assert torch.equal(pipe.transformer(y).cpu(), plain.transformer(y))
        assert (residents(backend), residents(backend, "transformer_2")) == (5, 5)


def test_a_block_that_became_resident_is_called_by_itself(make, device, x):
    """Its hook brings its component along, as that of a streamed one does."""
    plain, pipe, budget = make(), make(), grown(make, device)
    with torch.no_grad():
        adapt(pipe.transformer)
    with pipe.enable_omni_offload("layer", device=device, device_memory=budget) as backend, torch.no_grad():
        no_adapter(pipe.transformer)
        pipe(x)
        assert residents(backend) > 0
        y = torch.randn(2, WIDTH)
        for mine, other in zip(pipe.transformer.blocks, plain.transformer.blocks, strict=True):
            assert torch.equal(mine(y).cpu(), other(y))
        pipe.transformer.blocks[0].down = nn.Linear(1, 1)
        for block in pipe.transformer.blocks:
            block.adapter = None
        with pytest.raises(RuntimeError, match="shapes"):
            pipe.transformer.blocks[0](y)
        backend.release()
        assert sum(part.resident_bytes for part in backend.report().components) == 0
