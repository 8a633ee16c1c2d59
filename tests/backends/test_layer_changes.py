"""What changes while blocks stream: who has which bytes, which blocks there are, what stands for a method."""

import copy
import types

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin, resolve_offload_plan
from omni_offload.config import make_config
from omni_offload.errors import OffloadConfigError
from omni_offload.testing import sim

WIDTH = 16
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.down(torch.relu(self.up(x))))


class Stack(nn.Module):
    """Runs its own blocks, then borrowed ones, which are another model's."""

    def __init__(self, depth, borrowed=()):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.borrowed = nn.ModuleList(borrowed)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for block in (*self.blocks, *self.borrowed):
            x = block(x)
        return x


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def encode(self, x):
        return torch.tanh(self.proj(x))

    def forward(self, x):
        return self.encode(x)


class Pipe(OmniOffloadMixin):
    _dit_modules = ["controlnet", "transformer"]
    _encoder_modules = ["text_encoder"]
    _offload_entry_points = {"text_encoder": ("encode",)}
    _offload_plan = OffloadPlan(block_attrs={"controlnet": ("blocks",), "transformer": ("blocks",)})

    def __init__(self):
        torch.manual_seed(0)
        self.text_encoder, self.transformer, self.controlnet = Encoder(), Stack(5), None
        self.on_step = lambda _: None

    def __call__(self, x):
        for step in range(3):
            x = self.text_encoder.encode(x)
            x = x if self.controlnet is None else x + self.controlnet(x)
            x = self.transformer(x)
            self.on_step(step)
        return x


class Together(Pipe):
    _co_resident_modules = [("controlnet", "transformer")]


@pytest.fixture
def device(device):
    sim.configure(mode="virtual")
    return device


KEPT = {"device_memory": "1MiB", "keep_between_calls": True, "layer_options": {"dit": {"resident_layers": 0}}}


def _same(pipe, plain, calls=2):
    for _ in range(calls):
        assert torch.equal(pipe(X).cpu(), plain(X))


def _change(pipe, plain, edit, when):
    """Make a change between calls, or after the first step of one."""
    if when == "between":
        edit(pipe)
        edit(plain)
    else:
        for one in (pipe, plain):
            one.on_step = lambda step, one=one: edit(one) if step == 0 else None
        _same(pipe, plain, calls=1)
        for one in (pipe, plain):
            one.on_step = lambda _: None


# ---- whose bytes are whose ---------------------------------------------------------------------------------------------------


def _of_two_blocks(pipe):
    pipe.transformer.blocks[3].up.weight.data = pipe.transformer.blocks[1].up.weight.data


def _of_block_and_rest(pipe):
    pipe.transformer.embed.weight.data = pipe.transformer.blocks[2].up.weight.data[:WIDTH]


def _of_block_and_encoder(pipe):
    pipe.text_encoder.proj.weight.data = pipe.transformer.blocks[2].up.weight.data[:WIDTH]


@pytest.mark.parametrize("keys", [{}, KEPT], ids=["", "kept"])
@pytest.mark.parametrize("when", ["between", "step"])
@pytest.mark.parametrize("tie", [_of_two_blocks, _of_block_and_rest, _of_block_and_encoder], ids=lambda tie: tie.__name__[1:])
def test_bytes_that_come_to_be_shared(device, tie, when, keys):
    """Weights that are given memory of another block, of the rest or of another component are right, and one: an edit is in all."""
    pipe, plain = Pipe(), Pipe()
    with pipe.enable_omni_offload("layer", device=device, **keys), torch.no_grad():
        _same(pipe, plain, calls=1)
        _change(pipe, plain, tie, when)
        _same(pipe, plain)
        for one in (pipe, plain):
            one.transformer.blocks[2].up.weight.mul_(1.25)
            one.transformer.blocks[1].up.weight.mul_(0.75)
        _same(pipe, plain)
    assert torch.equal(pipe(X), plain(X))


VIEWS = {
    "overlap": lambda flat: flat[128 : 128 + 512].view(2 * WIDTH, WIDTH),
    "part": lambda flat: flat[64 : 64 + 2 * WIDTH],
    "every second": lambda flat: flat[1 : 1 + 1024 : 2].view(2 * WIDTH, WIDTH),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_one_memory_in_two_components(device, view):
    """Blocks' weights that begin elsewhere than what they share bytes with stay with the rest too, and an edit is in both."""

    def make():
        pipe = Pipe()
        flat = torch.linspace(-0.3, 0.3, 2000)
        pipe.text_encoder.proj.weight.data = flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)
        up = pipe.transformer.blocks[2].up
        (up.bias if view == "part" else up.weight).data = VIEWS[view](flat)
        return pipe

    pipe, plain = make(), make()
    assert resolve_offload_plan(pipe, make_config("layer")).component("transformer").rest_paths == ("transformer.blocks.2.up",)
    with pipe.enable_omni_offload("layer", device=device, **KEPT), torch.no_grad():
        _same(pipe, plain)
        for one in (pipe, plain):
            one.text_encoder.proj.weight.mul_(1.25)
        _same(pipe, plain)
    assert torch.equal(pipe(X), plain(X))


@pytest.mark.parametrize("keys", [{}, KEPT, {"slots": 2}], ids=["", "kept", "two slots"])
@pytest.mark.parametrize("kind", [Pipe, Together])
def test_a_model_that_comes_late_and_runs_blocks_of_another(device, kind, keys):
    """Blocks that a model put there while offload is enabled borrows are no longer in slots, which other blocks are copied into."""
    pipe, plain = kind(), kind()
    with pipe.enable_omni_offload("layer", device=device, **keys), torch.no_grad():
        _same(pipe, plain, calls=1)
        for one in (pipe, plain):
            torch.manual_seed(4)
            one.controlnet = Stack(3, borrowed=one.transformer.blocks[:2])
        _same(pipe, plain, calls=3)
        for one in (pipe, plain):
            one.transformer.blocks[0].up.weight.mul_(1.5)
        _same(pipe, plain)
        pipe.controlnet = plain.controlnet = None
        _same(pipe, plain)
    assert torch.equal(pipe(X), plain(X))


# ---- which blocks there are --------------------------------------------------------------------------------------------------


def _new():
    torch.manual_seed(3)
    return Block().requires_grad_(False)


def _fewer(pipe):
    pipe.transformer.blocks = nn.ModuleList(pipe.transformer.blocks[index] for index in (4, 2, 0))


CONTAINERS = {
    "append": lambda pipe: pipe.transformer.blocks.append(_new()),
    "insert": lambda pipe: pipe.transformer.blocks.insert(1, _new()),
    "replace": lambda pipe: pipe.transformer.blocks.__setitem__(2, _new()),
    "a copy": lambda pipe: pipe.transformer.blocks.append(copy.deepcopy(pipe.transformer.blocks[0])),
    "again": lambda pipe: pipe.transformer.blocks.append(pipe.transformer.blocks[0]),
    "remove": lambda pipe: pipe.transformer.blocks.__delitem__(1),
    "another list": _fewer,
    "none": lambda pipe: setattr(pipe.transformer, "blocks", nn.ModuleList()),
}


def test_blocks_come_and_go(device):
    """A container that is changed while offload is enabled is right at once, change after change, within calls and between them."""
    pipe, plain = Pipe(), Pipe()
    with pipe.enable_omni_offload("layer", device=device, keep_between_calls=True), torch.no_grad():
        for number, edit in enumerate(CONTAINERS.values()):
            _change(pipe, plain, edit, ("between", "step")[number % 2])
            _same(pipe, plain, calls=1)
    assert torch.equal(pipe(X), plain(X))


# ---- what stands for a method ------------------------------------------------------------------------------------------------


def _of_block(pipe):
    block = pipe.transformer.blocks[2]
    block.forward = types.MethodType(lambda self, x: x - self.down(torch.relu(self.up(x))), block)


def _of_component(pipe):
    pipe.transformer.forward = types.MethodType(lambda self, x: self.embed(self.blocks[3](self.blocks[1](x))), pipe.transformer)


def _of_block_around(pipe):
    block = pipe.transformer.blocks[2]
    own = block.forward
    block.forward = lambda x: own(x) * 2


def _of_blocks_swapped(pipe):
    first, last = pipe.transformer.blocks[0], pipe.transformer.blocks[3]
    first.forward, last.forward = last.forward, first.forward


def _taken_out(pipe):
    pipe.transformer.blocks[2].__dict__.pop("forward", None)


@pytest.mark.parametrize("when", ["between", "step"])
@pytest.mark.parametrize(
    "patch", [_of_block, _of_component, _of_block_around, _of_blocks_swapped, _taken_out], ids=lambda patch: patch.__name__[1:]
)
def test_a_forward_that_is_put_in_the_place_of_another(device, patch, when):
    """What a user puts in the place of `forward` while offload is enabled runs with the weights on the device, and stays afterwards."""
    pipe, plain = Pipe(), Pipe()
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        _same(pipe, plain, calls=1)
        _change(pipe, plain, patch, when)
        _same(pipe, plain)
    assert torch.equal(pipe(X), plain(X))


def test_a_forward_that_is_put_back(device):
    """What stood there before, put back by who put another in its place, is hooked as before; nothing of it stays afterwards."""
    pipe, plain = Pipe(), Pipe()
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        for _ in range(2):
            own = [[block.forward for block in one.transformer.blocks] for one in (pipe, plain)]
            for one in (pipe, plain):
                _of_blocks_swapped(one)
            _same(pipe, plain, calls=1)
            for one, methods in zip((pipe, plain), own, strict=True):
                for block, method in zip(one.transformer.blocks, methods, strict=True):
                    block.forward = method
            _same(pipe, plain)
    assert not any("forward" in vars(block) for block in pipe.transformer.blocks)
    assert torch.equal(pipe(X), plain(X))


def test_an_entry_point_that_is_put_in_the_place_of_another(device):
    """It is hooked from the next call on."""
    pipe, plain = Pipe(), Pipe()
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        _same(pipe, plain, calls=1)
        for one in (pipe, plain):
            one.text_encoder.encode = types.MethodType(lambda self, x: self.proj(x) + 1, one.text_encoder)
        _same(pipe, plain)
    assert "encode" in vars(pipe.text_encoder)
    assert torch.equal(pipe(X), plain(X))


# ---- what models that move together need -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, None], ids=["one resident each", "as many as fit"])
def test_slots_that_two_models_have_in_common_count_once(device, number):
    """A budget of the rests, one resident block each and one set of slots is enough, is filled and is kept; a byte less is refused."""
    pipe, plain = Together(), Together()
    for one in (pipe, plain):
        torch.manual_seed(4)
        one.controlnet = Stack(5)
    options = {"dit": {"resident_layers": 1}}
    with pipe.enable_omni_offload("layer", device=device, layer_options=options) as backend:
        both = [backend._rotation.members[name].owner.residency for name in ("controlnet", "transformer")]
        budget = sum(one.own_padded_bytes for one in both) + both[0].pool_bytes
    options = {"dit": {"resident_layers": number}}
    with pipe.enable_omni_offload("layer", device=device, device_memory=budget, layer_options=options) as backend, torch.no_grad():
        both = [backend._rotation.members[name].owner.residency for name in ("controlnet", "transformer")]
        assert sum(len(one.blocks) - len(one.ring.blocks) for one in both) == 2
        _same(pipe, plain)
        assert backend.report().peak_device_bytes <= budget
    if number is not None:
        with pytest.raises(OffloadConfigError, match="1 resident blocks and 3 slots take"):
            pipe.enable_omni_offload("layer", device=device, device_memory=budget - 1, layer_options=options)
