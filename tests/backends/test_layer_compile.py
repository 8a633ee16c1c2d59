"""torch.compile and streaming: what the hooks surround is compiled, once for all blocks and steps, and they run around it."""

import pytest
import torch
from diffusers import ModelMixin
from torch import _dynamo as dynamo
from torch import nn
from torch._dynamo.utils import counters

from omni_offload import Lane, OffloadPlan
from omni_offload.testing import sim
from pipelines.flux.cases import FLUX
from pipelines.stable_diffusion.cases import TEXT_TO_IMAGE

WIDTH = 32


class Block(nn.Module):
    """One block; it raises where it is told to, before it is compiled or after."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.full((), 1.5))

    def forward(self, x, fail=False):
        if fail:
            raise ValueError("told to")
        return x + torch.tanh(self.up(x)) * self.factor


class Stack(ModelMixin):
    """A loop over blocks between two other parts."""

    _repeated_blocks = ["Block"]

    def __init__(self, depth):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.fail_at = None

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x, index == self.fail_at)
        return self.norm(x)


@pytest.fixture(scope="session")
def make(kit):
    """Make the streaming pipeline."""

    class Streaming(kit.Pipe):
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

        def __init__(self, depth=6):
            super().__init__()
            self.transformer = Stack(depth).requires_grad_(False)

        def __call__(self, x):
            for _ in range(self.steps):
                x = self.transformer(x)
            return x

    return Streaming


@pytest.fixture
def device(device):
    sim.configure(mode="virtual")
    return device


@pytest.fixture
def y():
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def graphs():
    """Give the number of graphs compiled so far; nothing that was compiled before or here is left."""
    dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    dynamo.reset()


def _whole(pipe, **options):
    pipe.transformer.compile(backend="aot_eager", **options)


def _by_block(pipe, **options):
    pipe.transformer.compile_repeated_blocks(backend="aot_eager", **options)


def _one_graph_a_block(pipe):
    _by_block(pipe, fullgraph=True)


def _object(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager")


WAYS = [(way, order) for way in (_whole, _by_block, _one_graph_a_block, _object) for order in ("before", "after")]
FAST = {(_whole, "before"), (_one_graph_a_block, "before"), (_one_graph_a_block, "after"), (_object, "before")}
SOME = [pytest.param(*one, marks=() if one in FAST else pytest.mark.exhaustive) for one in WAYS]


def _again_without_a_compilation(pipe, x, want):
    with dynamo.config.patch(error_on_recompile=True), torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), want)


@pytest.mark.parametrize("residents", [2, pytest.param(0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("way", "order"), SOME)
def test_blocks_are_compiled_once(make, device, y, graphs, way, order, residents):
    """One graph serves all streamed blocks in all steps, compiled before or after enabling, and gives what a resident run gives."""
    plain, pipe = make(), make()
    way(plain)
    with torch.no_grad():
        want = plain(y)
    before = graphs()
    if order == "before":
        way(pipe)
    options = {"dit": {"resident_layers": residents}}
    with pipe.enable_omni_offload("layer", device=device, layer_options=options), torch.no_grad():
        if order == "after":
            way(pipe)
        assert torch.equal(pipe(y).cpu(), want)
        assert graphs() - before == 1
        _again_without_a_compilation(pipe, y, want)
    assert sim.races() == []


@pytest.mark.parametrize("way", [_whole, pytest.param(_one_graph_a_block, marks=pytest.mark.exhaustive)])
def test_after_disable(make, kit, device, y, graphs, way):
    """What was compiled while enabled is compiled still after disable, and knows of no hook."""
    pipe = make()
    plain = make()
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        way(pipe)
        pipe(y)
    assert kit.hooks(pipe) == []
    way(plain)
    before = graphs()
    with torch.no_grad():
        want = plain(y)
        made = graphs() - before
        assert torch.equal(pipe(y), want)
        assert graphs() - before == made  # the same code, seen the same way
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        assert torch.equal(pipe(y).cpu(), want)


def test_module_mode_is_one_graph(make, device, y, graphs):
    """A component that rotates whole is one graph, also where no break is allowed."""
    pipe, plain = make(), make()
    _whole(plain, fullgraph=True)
    _whole(pipe, fullgraph=True)
    with torch.no_grad():
        want = plain(y)
    before = graphs()
    with pipe.enable_omni_offload("module", device=device), torch.no_grad():
        assert torch.equal(pipe(y).cpu(), want)
        assert graphs() - before == 1
        _again_without_a_compilation(pipe, y, want)


def test_one_graph_over_streamed_blocks_is_refused(make, device, y, graphs):
    """Where the whole model must be one graph, the error says what to do instead, and the next call is right."""
    pipe, plain = make(), make()
    _whole(pipe, fullgraph=True)
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        with pytest.raises(RuntimeError, match="compile_repeated_blocks"):
            pipe(y)
        pipe.transformer._compiled_call_impl = None
        assert torch.equal(pipe(y).cpu(), plain(y))


@pytest.mark.parametrize(("mode", "way"), [("layer", _one_graph_a_block), ("layer", _whole), ("module", _whole)])
def test_a_recording_compiles_nothing(make, device, y, graphs, mode, way):
    """What is compiled runs as it stands while it is recorded, and gives the same."""
    pipe = make()
    way(pipe)
    with pipe.enable_omni_offload(mode, device=device) as backend, torch.no_grad():
        want = pipe(y).cpu()
        assert graphs() == 1
        with backend.record() as recording:
            _again_without_a_compilation(pipe, y, want)
    assert recording.lane(Lane.COMPUTE)
    assert sum(span.nbytes for span in recording.lane(Lane.COPY_IN)) > 0


@pytest.mark.parametrize("way", [_by_block, pytest.param(_whole, marks=pytest.mark.exhaustive)])
def test_an_exception_in_a_compiled_block(make, device, y, graphs, way):
    """An error leaves nothing behind: the block's hooks are in place, and the next call is right."""
    pipe, plain = make(), make()
    way(pipe)
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        for fail_at in (None, 3, 0):
            pipe.transformer.fail_at = fail_at
            if fail_at is None:
                pipe(y)
                continue
            with pytest.raises(ValueError, match="told to"):
                pipe(y)
        pipe.transformer.fail_at = None
        assert torch.equal(pipe(y).cpu(), plain(y))
        assert torch.equal(pipe.transformer.blocks[2].forward(y).cpu(), plain.transformer.blocks[2](y))


def test_torch_hooks_of_users(make, device, y, graphs):
    """Users' hooks on a compiled block run once a call, where its weights are on the device."""
    pipe, plain, seen = make(), make(), []
    _by_block(pipe)
    pipe.transformer.blocks[1].register_forward_hook(dynamo.disable(lambda module, *_: seen.append(module.up.weight.device)))
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        assert torch.equal(pipe(y).cpu(), plain(y))
    assert seen == [device] * pipe.steps


def test_a_compiled_entry_point(make, device, graphs):
    """A method that the user compiled in place, before enabling or after, runs with its weights on the device."""
    plain = make()
    x = torch.randn(2, 64)
    for order in ("before", "after"):
        pipe = make()
        if order == "before":
            pipe.vae.decode = torch.compile(pipe.vae.decode, backend="aot_eager")
        with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
            if order == "after":
                pipe.vae.decode = torch.compile(pipe.vae.decode, backend="aot_eager")
            for _ in range(2):
                assert torch.equal(pipe.vae.decode(x).cpu(), plain.vae.decode(x))


def _by_data(pipe):
    pipe.transformer.blocks[4].up.weight.data = pipe.transformer.blocks[4].up.weight.data * 1.25


def _in_place(pipe):
    with torch.no_grad():
        for block in pipe.transformer.blocks:
            block.up.bias.add_(0.125)


def _wider(pipe):
    """What is new in each block changes what a budget holds."""
    for index, block in enumerate(pipe.transformer.blocks):
        block.extra = nn.Linear(WIDTH, index + 1).requires_grad_(False)


def _narrower(pipe):
    for block in pipe.transformer.blocks:
        del block.extra


def _replaced(pipe):
    pipe.transformer.blocks[0].up.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25), requires_grad=False)


@pytest.mark.parametrize("way", [_one_graph_a_block, pytest.param(_whole, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "residents",
    [{"device_memory": 36864}, {"layer_options": {"dit": {"resident_layers": 2}}}],
    ids=["budget", "number"],
)
def test_edits_after_compilation(make, device, y, graphs, way, residents):
    """Weights that are edited after their blocks were compiled are in force in the next call, also where other blocks stay from then on."""
    plain, pipe, streamed = make(12), make(12), set()
    way(plain)
    way(pipe)
    torch.manual_seed(3)
    with pipe.enable_omni_offload("layer", device=device, **residents) as backend, torch.no_grad():
        for edit in (None, _in_place, _by_data, _wider, _in_place, _narrower, _replaced, _by_data):
            for one in (plain, pipe) if edit is not None else ():
                edit(one)
            want = plain(y)
            for _ in range(2):
                assert torch.equal(pipe(y).cpu(), want), edit
            streamed.add(len(backend._rotation.members["transformer"].owner.residency.ring.blocks))
    assert (len(streamed) > 1) is ("device_memory" in residents), streamed
    assert sim.races() == []


def _unet(pipe):
    pipe.unet.compile(backend="aot_eager")


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(FLUX, _one_graph_a_block, id="flux, repeated blocks"),
        pytest.param(FLUX, _whole, id="flux, whole"),
        pytest.param(FLUX, _object, id="flux, object"),
        pytest.param(TEXT_TO_IMAGE, _unet, id="unet, whole"),
    ],
)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_diffusers_models(device, graphs, case, way, order):
    """Real models, compiled whole or by their repeated blocks: the first call compiles, and none after it does."""
    plain = case.make_pipeline()
    way(plain)
    want = case.outputs(plain(**case.make_inputs(plain)))
    resident = graphs()
    pipe = case.make_pipeline()
    if order == "before":
        way(pipe)
    with pipe.enable_omni_offload("layer", device=device):
        if order == "after":
            way(pipe)
        for number in range(3):
            got = [part.cpu() for part in case.outputs(pipe(**case.make_inputs(pipe)))]
            assert all(map(torch.equal, got, want))
            if number == 0:
                first = graphs() - resident
                assert first <= (resident if way is _one_graph_a_block else 60)
            assert graphs() - resident == first
    assert sim.races() == []
