"""Blocks stream through slots: right in any order, after any failure, with any weights."""

import contextlib
import itertools
import random
import re

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan
from omni_offload.backends.block_ring import BlockRing
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.residency import tensors
from omni_offload.testing import sim


class Block(nn.Module):
    """One block; it raises where it is told to, and can run another one within itself."""

    def __init__(self, width=32):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.inner = None
        self.fail = None

    def forward(self, x):
        x = x + torch.tanh(self.down(torch.relu(self.up(x))))
        if self.fail is not None:
            raise self.fail
        return x if self.inner is None else x + self.inner[0](x)


class Stack(nn.Module):
    """Runs its blocks in the order that it is given."""

    def __init__(self, depth=5, width=32):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.order = list(range(depth))
        self.stop_after = None

    def forward(self, x):
        x = self.embed(x)
        for count, index in enumerate(self.order):
            x = self.blocks[index](x)
            if self.stop_after == count:
                return x
        return x


@pytest.fixture(scope="session")
def make(kit):
    """Make the streaming pipeline."""

    class Streaming(kit.Stacked):
        stack = Stack

    return Streaming


@pytest.fixture
def device(device):
    """Virtual time: exhaustive orders are many calls."""
    sim.configure(mode="virtual")
    return device


def _subsets(depth=5):
    numbers = range(depth)
    return [list(s) for size in range(1, depth + 1) for s in itertools.combinations(numbers, size)]


def _run(pipe, orders, x, fail_at=None, stop_after=None):
    """Run the transformer once per order; in the first, one block may raise or the loop may end early."""
    outputs = []
    for number, order in enumerate(orders):
        pipe.transformer.order = order
        pipe.transformer.stop_after = stop_after if number == 0 else None
        for index, block in enumerate(pipe.transformer.blocks):
            block.fail = RuntimeError("told to") if number == 0 and index == fail_at else None
        try:
            outputs.append(pipe.transformer(x).cpu())
        except RuntimeError as error:
            outputs.append(str(error))
    return outputs


def _same(a, b):
    return all(torch.equal(p, q) if isinstance(p, torch.Tensor) else p == q for p, q in zip(a, b, strict=True))


PAIRS = list(itertools.product(_subsets(), _subsets()))
SAMPLED = random.Random(0).sample(PAIRS, 60)


def _check_pairs(make, device, pairs):
    plain, pipe = make(), make()
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(7))
    with pipe.enable_omni_offload("layer", device=device):
        for pair in pairs:
            cases = [{}, *({"fail_at": index} for index in pair[0]), *({"stop_after": count} for count in range(len(pair[0])))]
            for case in cases:
                with torch.no_grad():
                    got, want = _run(pipe, pair, x, **case), _run(plain, pair, x, **case)
                assert _same(got, want), (pair, case)
                assert len(pipe.offload_backend._rotation.members["transformer"].owner.residency.ring.pool) <= 3
    assert sim.races() == []


def test_any_order(make, device):
    """Skipped, aborted and failing passes: every output is a resident run's (a fixed sample of all pairs of subsets)."""
    _check_pairs(make, device, SAMPLED)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_any_order_exhaustively(make, device):
    """Five blocks, two passes, all 961 pairs of subsets, each also with an exception in each block and each early exit."""
    assert len(PAIRS) == 961
    _check_pairs(make, device, PAIRS)


@pytest.mark.parametrize("mode", ["threads", "virtual"])
@pytest.mark.parametrize("keys", [{}, {"slots": 2}, {"pin_memory": False}, {"layer_options": {"dit": {"resident_layers": 2}}}], ids=str)
def test_call(make, device, x, keys, mode):
    """A call gives what a resident pipeline gives, and leaves nothing on the device."""
    sim.configure(mode=mode, copy_latency=2e-4 if mode == "threads" else None)
    want = make()(x)
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, **keys), torch.no_grad():
        for _ in range(3):
            assert torch.equal(pipe(x).cpu(), want)
            assert sim.allocated() <= x.numel() * 8
    sim.configure(copy_latency=0.0)


# ---- order --------------------------------------------------------------------------------------------------------------------


def _nest(pipe, depth):
    """Let block 0 run block 1 within itself, that one block 2, and so on."""
    blocks = pipe.transformer.blocks
    for index in range(depth):
        blocks[index].inner = [blocks[index + 1]]  # in a list: no submodule
    pipe.transformer.order = [0, depth]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_nested_blocks(make, device, x, depth):
    """Blocks that run within one another are right, also more of them than there are slots."""
    plain, pipe = make(), make()
    _nest(plain, depth)
    _nest(pipe, depth)
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), plain(x))


def test_nested_too_deep_for_a_budget(make, device, x):
    """Under a budget, no memory beyond the slots is taken: the call is refused by name, and the pipeline stays usable."""
    pipe, plain = make(), make()
    with pipe.enable_omni_offload("layer", device=device, device_memory=_least(pipe, device)), torch.no_grad():
        _nest(pipe, 4)
        with pytest.raises(OffloadStateError, match=r"transformer\.blocks\.3 was called within .*blocks\.0, .* raise 'slots'"):
            pipe(x)
        for block in pipe.transformer.blocks:
            block.inner = None
        pipe.transformer.order = plain.transformer.order
        assert torch.equal(pipe(x).cpu(), plain(x))


def _least(pipe, device):
    """The least budget that is taken."""
    with pytest.raises(OffloadConfigError) as error:
        pipe.enable_omni_offload("layer", device=device, device_memory=64)
    return int(re.search(r"needs (\d+)", str(error.value))[1])


def test_a_block_within_itself(make, device, x):
    """A block that calls itself is bound until the outermost use ends."""
    plain, pipe = make(), make()
    for one in (plain, pipe):
        block = one.transformer.blocks[1]
        own, calls = type(block).forward, []

        def twice(y, block=block, own=own, calls=calls):
            calls.append(1)
            return own(block, block(y) if len(calls) % 2 else y)

        block.forward = twice
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))


def test_forward_is_called_directly(make, device, x):
    """A block that is called through `.forward` streams too."""
    plain, pipe = make(), make()
    for one in (plain, pipe):
        blocks = one.transformer.blocks
        one.transformer.forward = lambda y, blocks=blocks: [y := block.forward(y) for block in blocks][-1]
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))


def test_a_block_outside_of_its_component(make, device):
    """A block that the pipeline itself calls brings its component along, aligns its inputs, and lets go again."""
    plain, pipe = make(), make()
    y = torch.randn(2, 32)
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        for _ in range(2):
            out = pipe.transformer.blocks[3](y)
            assert out.device == device
            assert torch.equal(out.cpu(), plain.transformer.blocks[3](y))
        pipe.transformer.blocks[2].fail = RuntimeError("told to")
        with pytest.raises(RuntimeError, match="told to"):
            pipe.transformer.blocks[2](y)
        backend.release()
        assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.parameters())


def test_rest_submodules(make, device, x):
    """What a parent uses of a block after its loop is declared in rest_submodules, and stays with the rest."""

    class Late(make):
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)}, rest_submodules=frozenset({"transformer.blocks.0.down"}))

    plain, pipe = Late(), Late()
    for one in (plain, pipe):
        stack = one.transformer
        stack.forward = lambda y, stack=stack: stack.blocks[0].down(torch.cat([type(stack).forward(stack, y)] * 2, dim=1))
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
    assert not hasattr(plain.transformer.blocks[0].down, "_omni_hook_registry")


def test_undeclared_use_of_a_block(make, device, x):
    """Without the declaration, the error names component and parameter."""
    pipe = make()
    stack = pipe.transformer
    stack.forward = lambda y: type(stack).forward(stack, y) @ stack.blocks[0].down.weight[:, :32]
    named = pytest.raises(OffloadStateError, match=r"transformer.*blocks\.0\.down.*rest_submodules")
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad(), named:
        pipe(x)


def test_misses_and_waste_are_counted(make, device, x):
    """A pass in the learned order only hits; one in another order misses, and what was fetched for nothing is counted."""
    pipe = make()
    y = torch.randn(2, 32)
    with pipe.enable_omni_offload("layer", device=device, keep_between_calls=True) as backend, torch.no_grad():
        pipe.transformer(y)
        first = _counts(backend)
        pipe.transformer(y)
        second = _counts(backend)
        assert second.prefetch_hits - first.prefetch_hits == 5
        assert (second.misses, second.wasted_copies) == (first.misses, first.wasted_copies)
        pipe.transformer.order = [4, 3, 2, 1, 0]
        pipe.transformer(y)
        third = _counts(backend)
        assert third.misses > second.misses
        assert third.wasted_copies > second.wasted_copies
        pipe.transformer(y)
        assert _counts(backend).misses == third.misses  # learned again


def test_loads_of_blocks_alone_are_counted(make, device, x):
    """A component of which everything streams counts a load each time that it comes, as any other does."""
    pipe = make()
    pipe.transformer.embed = nn.Identity()
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        for number in (1, 2):
            pipe(x)
            assert (_counts(backend).loads, _counts(backend).misses) == (number, number)


def _counts(backend):
    return next(part for part in backend.report().components if part.name == "transformer")


def test_a_cast_within_a_pass_is_in_force_and_kept(make, device, x):
    """Blocks that are cast while another runs, fetched ahead or not, run with what they were cast to, then and later."""

    def cast(stack, *_):
        stack.blocks.to(torch.float16).to(torch.float32)

    plain, pipe = make(), make()
    for one in (plain, pipe):
        one.transformer.blocks[0].register_forward_hook(lambda *_, stack=one.transformer: cast(stack))
    want = [plain(x), plain(x)]
    assert not torch.equal(want[0], make()(x))
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        assert [torch.equal(pipe(x).cpu(), wanted) for wanted in want] == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(pipe.transformer.parameters(), plain.transformer.parameters(), strict=True))


# ---- memory -------------------------------------------------------------------------------------------------------------------


def test_budget(kit, make, device, x):
    """From the least budget on, what the framework holds is at most the budget, and the more is resident the more there is."""
    plain, pipe = make(), make()
    want = plain(x)
    least = _least(pipe, device)
    whole = sum(kit.padded(module) for module in (pipe.text_encoder, pipe.transformer, pipe.vae))
    moved = []
    for budget in (least, least + 9000, least + 20000, whole):
        with pipe.enable_omni_offload("layer", device=device, device_memory=budget) as backend, torch.no_grad():
            for _ in range(2):
                assert torch.equal(pipe(x).cpu(), want)
            assert backend.report().peak_device_bytes <= budget
            moved.append(_counts(backend).bytes_in)
        with pytest.raises(OffloadConfigError, match="needs"):
            pipe.enable_omni_offload("layer", device=device, device_memory=least - 1)
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1]


def test_number_of_residents_that_does_not_fit(make, device):
    """Resident blocks that were asked for and do not fit are an error that says what they take."""
    pipe = make()
    budget = _least(pipe, device) + 100
    with pytest.raises(OffloadConfigError, match=r"component 'transformer' cannot stream with 4 resident blocks: .* take \d+ bytes"):
        pipe.enable_omni_offload("layer", device=device, device_memory=budget, layer_options={"dit": {"resident_layers": 4}})


def test_host_memory_for_a_part_of_the_weights(kit, make, device):
    """Weights beyond `host_memory` go through a staging ring, which is reserved first: small blocks come last, and leave it no room."""
    pipe = make()
    pipe.transformer = Stack(depth=3, width=16).requires_grad_(False)
    limit = sum(kit.padded(module) for module in (pipe.text_encoder, pipe.transformer, pipe.vae)) - 64
    with pipe.enable_omni_offload("layer", device=device, slots=2, host_memory=limit) as backend:
        assert 0 < backend.report().pinned_host_bytes <= limit


def test_all_resident(make, device, x):
    """Zero streamed blocks is allowed: there are no slots then."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device, layer_options={"dit": {"resident_layers": 5}}) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert _counts(backend).prefetch_hits == 0


def test_steady_state_allocates_nothing(make, device):
    """From the second pass on, a pass allocates on the device what a resident one does, and no more."""
    pipe, y, counts = make(), torch.randn(2, 32, device=device), []
    plain = make().transformer.to(device)
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        for run in (plain, pipe.transformer):
            run(y)
            before = sim.allocation_count()
            run(y)
            counts.append(sim.allocation_count() - before)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("allocation", range(1, 12))
def test_out_of_memory(make, device, x, allocation):
    """Whatever allocation of weights fails: the error is torch's own, and the next call is right."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        sim.configure(fail_alloc_in=allocation)
        with contextlib.suppress(torch.OutOfMemoryError):
            pipe(x)
        sim.configure(fail_alloc_in=-1)
        assert torch.equal(pipe(x).cpu(), plain(x))


# ---- weights ------------------------------------------------------------------------------------------------------------------


def _edits():
    def in_place(stack):
        for parameter in stack.parameters():
            parameter.add_(0.01)

    def by_data(stack):
        for parameter in stack.parameters():
            parameter.data.mul_(1.5)

    def new_object(stack):
        stack.blocks[1].up.weight = nn.Parameter(stack.blocks[1].up.weight.detach() * 2, requires_grad=False)

    def grow(stack):
        for block in stack.blocks:
            block.up = nn.Sequential(block.up, nn.Linear(64, 64, bias=False).requires_grad_(False))
            block.up[1].weight.copy_(torch.eye(64) * 2)

    def shrink(stack):
        stack.blocks[2].down = nn.Linear(64, 32, bias=False).requires_grad_(False)
        stack.blocks[2].down.weight.fill_(0.01)

    def tie(stack):
        stack.blocks[3].up.weight = stack.blocks[1].up.weight

    def cast(stack):
        stack.to(torch.float64).to(torch.float32)

    return [in_place, by_data, new_object, grow, shrink, tie, cast]


@pytest.mark.parametrize(
    "keys", [{}, {"layer_options": {"dit": {"resident_layers": 2}}}, {"pin_memory": False}], ids=["", "residents", "pageable"]
)
@pytest.mark.parametrize("edit", _edits(), ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("when", ["between calls", "in a step"])
def test_edits(make, device, x, edit, when, keys):
    """A change of the weights is in force from the next pass on, exactly once, whatever it is in: streamed, resident, fetched ahead, rest."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device, **keys), torch.no_grad():
        for one in (plain, pipe):
            one(x)
            if when == "in a step":
                one.on_step = lambda step, y, one=one: (edit(one.transformer) if step == 1 else None, y)[1]
            else:
                edit(one.transformer)
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), plain(x))
            pipe.on_step = plain.on_step = lambda _, y: y


def _strange(stack):
    """Give two blocks tensors of every kind."""
    for block in (stack.blocks[0], stack.blocks[4]):
        block.register_buffer("large", torch.zeros(1 << 18 | 16))
        block.register_buffer("count", torch.zeros((), dtype=torch.int64))
        block.register_parameter("mask", nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False))
        block.register_parameter("turn", nn.Parameter(torch.tensor([1j, 2.0]), requires_grad=False))
        block.register_parameter("none", nn.Parameter(torch.empty(0, 4), requires_grad=False))
        block.register_parameter("small", nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False))
        block.register_parameter("wide", nn.Parameter(torch.ones(1, 1).expand(4, 4), requires_grad=False))
        block.up.weight = nn.Parameter(block.up.weight.t().contiguous().t(), requires_grad=False)
        own = block.forward

        def forward(y, block=block, own=own):
            block.large.add_(1)
            block.count += 1
            assert block.up.weight.stride() == (1, 64)
            factor = block.turn.abs().sum() * block.small.float().sum() * block.wide.sum() * block.mask.sum()
            return own(y) * (factor / 576) + block.large[0] + block.count

        block.forward = forward


@pytest.mark.parametrize("pin_memory", [True, False])
def test_strange_tensors(make, device, x, pin_memory):
    """Strides, 0-dim, empty, expanded, fp8, bool and complex tensors stream; buffers written in forward survive."""
    plain, pipe = make(), make()
    _strange(plain.transformer)
    _strange(pipe.transformer)
    with pipe.enable_omni_offload("layer", device=device, pin_memory=pin_memory), torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), plain(x))
    for (name, got), want in zip(pipe.transformer.state_dict().items(), plain.transformer.state_dict().values(), strict=True):
        assert torch.equal(got, want), name


def test_ties(make, device, x):
    """Weights that blocks, or a block and the rest, share keep one host and one device copy: they stay with the rest."""
    pipe, plain = make(), make()
    for one in (plain, pipe):
        blocks = one.transformer.blocks
        blocks[2].up.weight = blocks[0].up.weight
        blocks[3].down.weight = nn.Parameter(blocks[0].up.weight.data.view(32, 64), requires_grad=False)
        blocks[4].up.bias = nn.Parameter(one.transformer.embed.weight.data.view(-1)[:64], requires_grad=False)
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        blocks = pipe.transformer.blocks
        assert blocks[2].up.weight is blocks[0].up.weight
        assert blocks[3].down.weight.data_ptr() == blocks[0].up.weight.data_ptr()
        assert _counts(backend).weight_bytes < sum(p.nbytes for p in pipe.transformer.parameters())


# ---- owners -------------------------------------------------------------------------------------------------------------------


def test_two_pipelines_share_a_streamed_component(make, device, x):
    """Two pipelines over one component have one ring; it goes with the last of them."""
    plain, first, second = make(), make(), make(seed=1)
    second.transformer = first.transformer
    one = first.enable_omni_offload("layer", device=device)
    two = second.enable_omni_offload("layer", device=device)
    with torch.no_grad():
        assert torch.equal(first(x).cpu(), plain(x))
        second(x)
        one.disable()
        second(x)
        two.disable()
    assert torch.equal(first(x), plain(x))


def test_model_level_and_layers_do_not_share(make, device):
    """A component that streams for one pipeline cannot rotate whole for another."""
    first, second = make(), make(seed=1)
    second.transformer = first.transformer
    with first.enable_omni_offload("layer", device=device), pytest.raises(OffloadStateError, match="treatment"):
        second.enable_omni_offload("module", device=device)


def test_replaced_component(make, device, x):
    """A component put in the place of a streamed one is streamed from the next call on."""
    plain, pipe = make(seed=3), make()
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        pipe(x)
        for name in ("text_encoder", "transformer", "vae"):
            setattr(pipe, name, getattr(make(seed=3), name))
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert _counts(backend).treatment == "stream"
        assert _counts(backend).prefetch_hits > 0


def test_hand_written_pair(make, device, x):
    """A pipeline that drives its model-level offload itself streams like any other."""

    class ByHand(make):
        def enable_omni_model_cpu_offload(self, **_):
            raise AssertionError("layer modes do not call it")

        def disable_omni_model_cpu_offload(self):
            raise AssertionError("layer modes do not call it")

    pipe = ByHand()
    with pipe.enable_omni_offload("layer", device=device, device_memory="1MiB"), torch.no_grad():
        assert torch.equal(pipe(x).cpu(), make()(x))


# ---- the rest -----------------------------------------------------------------------------------------------------------------


def test_autograd_is_refused(make, device, x):
    """A block's weight that requires grad is refused by name where autograd would record."""
    pipe = make()
    pipe.transformer.blocks[2].up.weight.requires_grad_(True)
    with pipe.enable_omni_offload("layer", device=device), pytest.raises(OffloadStateError, match=r"blocks\.2\.up\.weight"):
        pipe(x)


def test_refresh(make, device, x):
    """An edit of one number through `.data`, which nothing shows, is in force after refresh()."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device, keep_between_calls=True) as backend, torch.no_grad():
        pipe(x)
        for one in (plain, pipe):
            one.transformer.blocks[0].up.weight.data[17, 3] += 1
        backend.refresh()
        assert torch.equal(pipe(x).cpu(), plain(x))


def test_a_block_uses_another_ones_weight(make, device, x):
    """The error names the block that did not run, not the one that did."""
    pipe = make()
    first, third = pipe.transformer.blocks[0], pipe.transformer.blocks[3]
    first.forward = lambda y: y @ third.down.weight[:, :32]
    named = pytest.raises(OffloadStateError, match=r"blocks\.3\.down\.weight.*its block did not run")
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad(), named:
        pipe(x)


def test_masters_are_free_after_a_pass(make, device):
    """A pass ends when its copies have landed: its masters may be edited from then on."""
    sim.configure(h2d_gbps=1e-4)
    pipe, y = make(), torch.randn(2, 32)
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        start = sim.clock()
        pipe.transformer(y)
        assert sim.clock() - start > sum(p.nbytes for p in pipe.transformer.blocks.parameters()) / 1e5
    sim.configure(h2d_gbps=0.0)


def test_interrupt_in_a_nested_block(make, device, x, monkeypatch):
    """An interrupt at the end of a nested block leaves nothing on the device, and the next call is right."""
    plain, pipe = make(), make()
    _nest(plain, 4)
    _nest(pipe, 4)
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(BlockRing, "leave", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                pipe(x)
        backend.release()
        assert _counts(backend).resident_bytes == 0
        assert torch.equal(pipe(x).cpu(), plain(x))


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_torch_hooks_on_a_block(make, device, x):
    """Users' torch hooks on a block run once, where its weights are on the device."""
    pipe, plain, seen = make(), make(), []
    block = pipe.transformer.blocks[1]
    block.register_forward_hook(lambda module, *_: seen.append(module.up.weight.device))
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
    assert seen == [device] * pipe.steps


def test_a_block_that_returns_a_generator(make, device):
    """A block called by itself that has not done its work when it returns is refused, and leaves nothing behind."""
    pipe = make()
    pipe.transformer.blocks[1].forward = lambda y: (part for part in y)
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        with pytest.raises(OffloadStateError, match="generator"):
            pipe.transformer.blocks[1](torch.randn(2, 32))
        backend.release()
        assert _counts(backend).resident_bytes == 0


@pytest.mark.parametrize("keys", [{}, {"device_memory": "128KiB"}], ids=["no budget", "budget"])
def test_what_is_looked_at_grows_with_the_blocks(make, device, x, monkeypatch, keys):
    """To enable, and to take in weights that came to every block, and went, looks at each tensor a few times, however many blocks there are."""
    looked, own = [], tensors.span_of
    monkeypatch.setattr(tensors, "span_of", lambda tensor: (looked.append(tensor), own(tensor))[1])

    def counts(depth):
        pipe = make(depth)

        def looks(action):
            looked.clear()
            action()
            return len(looked)

        def change(what):
            for block in pipe.transformer.blocks:
                block.up.extra = what()
            with torch.no_grad():
                pipe(x)

        yield looks(lambda: pipe.enable_omni_offload("layer", device=device, **keys))
        yield looks(lambda: change(lambda: nn.Linear(2, 2).requires_grad_(False)))
        yield looks(lambda: change(lambda: None))
        pipe.disable_omni_offload()

    for few, many in zip(counts(6), counts(24), strict=True):
        assert many < 6 * few, (few, many)
