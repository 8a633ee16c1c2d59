"""Every way to declare blocks, run: what is found streams, in whatever kind of container it lies."""

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.errors import OffloadConfigError
from omni_offload.testing import sim

WIDTH = 16


def _net():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Child(nn.Module):
    """A large child with a stack of its own, and weights beside it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.layers = nn.ModuleList(_net() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return x


class Single(nn.Module):
    """No container: one block."""

    def __init__(self):
        super().__init__()
        self.net = _net()
        self.part = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.part(self.net[0](x)) + self.net(x)


class Levels(nn.Module):
    """Lists of lists, which are never called themselves; the second runs twice."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList([nn.ModuleList([_net(), _net()]), nn.ModuleList([_net()])])

    def forward(self, x):
        for level in (self.levels[0], self.levels[1], self.levels[1]):
            for block in level:
                x = x + block(x)
        return x


class Model(nn.Module):
    """Containers of every kind, all of which run."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([_net(), nn.Identity(), _net()])
        self.blocks._modules["3"] = None
        self.named = nn.ModuleDict({"last": _net(), "first": _net()})
        self.chain = nn.Sequential(_net(), nn.Tanh(), _net())
        self.single = Single()
        self.nothing = None
        self.inner = Levels()
        self.child = Child()
        self.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x) if block is not None else x
        x = x + self.named["first"](x) + self.named["last"](x)
        return self.child(self.inner(self.single(x) + self.chain(x)))


def _pipe(plan=None, *, model=Model, kind="dit", **declared):
    class Pipe(OmniOffloadMixin):
        _dit_modules = ["transformer"] if kind == "dit" else []
        _encoder_modules = ["text_encoder"] if kind == "encoder" else []
        _offload_plan = plan or OffloadPlan()

        def __init__(self):
            torch.manual_seed(0)
            setattr(self, "transformer" if kind == "dit" else "text_encoder", type(model.__name__, (model,), declared)())

        def __call__(self, x):
            return (self.transformer if kind == "dit" else self.text_encoder)(x)

    return Pipe()


def _plan(*names, **others):
    return OffloadPlan(block_attrs={"transformer": names}, **others)


DECLARED = {
    "a list, with holes": (lambda: _pipe(_plan("blocks")), ["blocks.0", "blocks.2"]),
    "a dictionary": (lambda: _pipe(_plan("named")), ["named.last", "named.first"]),
    "a sequence": (lambda: _pipe(_plan("chain")), ["chain.0", "chain.2"]),
    "lists of lists": (lambda: _pipe(_plan("inner.levels")), ["inner.levels.0.0", "inner.levels.0.1", "inner.levels.1.0"]),
    "a module, beside None": (lambda: _pipe(_plan("single", "nothing", "blocks")), ["single", "blocks.0", "blocks.2"]),
    "everything": (
        lambda: _pipe(_plan("blocks", "named", "chain", "single", "inner.levels", "child.layers")),
        [
            *("blocks.0", "blocks.2", "named.last", "named.first", "chain.0", "chain.2", "single", "inner.levels.0.0", "inner.levels.0.1"),
            *("inner.levels.1.0", "child.layers.0", "child.layers.1", "child.layers.2"),
        ],
    ),
    "a large child": (
        lambda: _pipe(_plan("blocks", offload_submodules={"transformer.child": "layers"})),
        ["child.layers.0", "child.layers.1", "child.layers.2", "blocks.0", "blocks.2"],
    ),
    "the class": (lambda: _pipe(_layerwise_offload_blocks_attrs=["named", "single"]), ["named.last", "named.first", "single"]),
    "the plan before the class": (lambda: _pipe(_plan("chain"), _layerwise_offload_blocks_attrs=["named"]), ["chain.0", "chain.2"]),
    "an encoder": (
        lambda: _pipe(OffloadPlan(encoder_block_attrs={"text_encoder": ("blocks", "child.layers")}), kind="encoder"),
        ["blocks.0", "blocks.2", "child.layers.0", "child.layers.1", "child.layers.2"],
    ),
}


def _check(device, make, blocks):
    pipe, x = make(), torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
    want = make()(x)
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        (member,) = backend._rotation.members.values()
        assert [block.name.partition(".")[2] for block in member.owner.residency.ring.blocks.values()] == blocks
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), want)
        assert pipe.offload_report.components[0].treatment == "stream"
    assert torch.equal(pipe(x), want)


@pytest.mark.parametrize("declared", DECLARED)
def test_declared_blocks_stream(device, declared):
    """What is declared, and only that, streams, in declared order; the output is a resident run's."""
    sim.configure(mode="virtual")
    make, blocks = DECLARED[declared]
    _check(device, make, blocks)


def test_the_deprecated_singular(device):
    """The singular class attribute counts where nothing else is declared, with a warning a class."""

    def make():
        return _pipe(_layerwise_offload_blocks_attr="named")

    make()
    with pytest.warns(DeprecationWarning, match="_layerwise_offload_blocks_attr is deprecated"):
        _check(device, make, ["named.last", "named.first"])


def _refused(device, pipe, match, **keys):
    weights = [parameter.data_ptr() for parameter in pipe.transformer.parameters()]
    with pytest.raises(OffloadConfigError, match=match):
        pipe.enable_omni_offload("layer", device=device, **keys)
    assert [parameter.data_ptr() for parameter in pipe.transformer.parameters()] == weights
    assert pipe.offload_backend is None
    assert sim.h2d_bytes() == 0


def test_a_block_listed_twice(device):
    """A block in two containers, or twice in one, is refused by both names before anything moves."""
    pipe = _pipe(_plan("blocks", "named"))
    pipe.transformer.named["again"] = pipe.transformer.blocks[0]
    pipe.transformer.blocks.append(pipe.transformer.blocks[2])
    twice = r"'transformer\.blocks\.2' and 'transformer\.blocks\.4' are one module"
    _refused(device, pipe, twice)
    _refused(device, pipe, r"'transformer\.blocks\.0' and 'transformer\.named\.again' are one module")


def test_a_stack_of_one_block(device):
    """Asked for by its kind or its options, a stack of one block is refused with the reason; not asked for, it rotates."""
    reason = r"component 'transformer' has a stack of one block \(transformer\.single\); declare the blocks in it"
    _refused(device, _pipe(_plan("single")), reason, components=["dit"])
    _refused(device, _pipe(_plan("single")), reason, layer_options={"dit": {"resident_layers": 1}})
    pipe = _pipe(OffloadPlan(block_attrs={"transformer": ("single",), "other": ("blocks",)}))
    type(pipe)._dit_modules = ["transformer", "other"]
    pipe.other = Model()
    x = torch.randn(2, WIDTH)
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        rows = {row.name: row.treatment for row in pipe.offload_report.components}
        assert rows == {"transformer": "rotate", "other": "stream"}
        pipe(x)
        pipe.other(x)


def test_a_shared_part_of_two_blocks(device):
    """A module that lies in two blocks, and a weight of two components, have one copy each, with the rest."""
    sim.configure(mode="virtual")

    def make():
        pipe = _pipe(_plan("blocks", "child.layers"))
        model = pipe.transformer
        model.child.layers[1][0] = model.child.layers[0][0]
        model.single.part = model.blocks[2][2]  # of a block and of what lies outside of them
        model.child.layers[2][2].weight = model.blocks[0][2].weight
        model.single.net[0].weight = model.blocks[2][0].weight
        return pipe

    _check(device, make, ["blocks.0", "blocks.2", "child.layers.0", "child.layers.1", "child.layers.2"])


def test_a_component_that_is_a_compiled_module(device):
    """A module whose truth cannot be asked for (a compiled one has no length) is a component like any other."""

    class Unasked(Model):
        def __len__(self):
            raise TypeError("it has no length")

    _check(device, lambda: _pipe(_plan("blocks"), model=Unasked), ["blocks.0", "blocks.2"])


class Borrowing(nn.Module):
    """A model that runs two of another one's blocks between its own."""

    def __init__(self, lender):
        super().__init__()
        self.blocks = nn.ModuleList(_net() for _ in range(3))
        self.borrowed = nn.ModuleList(lender.blocks[:2])

    def forward(self, x):
        for block in (self.blocks[0], *self.borrowed, *self.blocks[1:]):
            x = x + block(x)
        return x


class Lender(nn.Module):
    """A model of five blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_net() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("together", [(), (("controlnet", "transformer"),)], ids=["in turn", "together"])
@pytest.mark.parametrize("slots", [2, 3])
def test_blocks_of_two_models(device, together, slots):
    """Two models that run the same blocks give what they give without offload: these blocks stay with the rest of each."""

    class Two(OmniOffloadMixin):
        _encoder_modules = _vae_modules = ()
        _dit_modules = ("controlnet", "transformer")
        _co_resident_modules = together
        _offload_plan = OffloadPlan(block_attrs={"controlnet": ("blocks",), "transformer": ("blocks",)})

        def __init__(self):
            torch.manual_seed(0)
            self.transformer = Lender().requires_grad_(requires_grad=False)
            self.controlnet = Borrowing(self.transformer).requires_grad_(requires_grad=False)

        def __call__(self, x):
            for _ in range(3):
                x = self.transformer(x + self.controlnet(x))
            return x

    pipeline, x = Two(), torch.linspace(-1, 1, WIDTH).reshape(1, WIDTH)
    expected = pipeline(x)
    with pipeline.enable_omni_offload("layer", device=device, slots=slots):
        for _ in range(2):
            assert torch.equal(pipeline(x.to(device)).cpu(), expected)
    assert sim.allocated() == 0
    assert torch.equal(pipeline(x), expected)
