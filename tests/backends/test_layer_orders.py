"""Streaming under random use: whatever runs in whatever order, beside whatever else is done, gives what a resident twin gives."""

import gc

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.testing import sim

WIDTH = 16
STACKS = ("text_encoder", "transformer", "transformer_2")
DEPTH = 6


class ToldToError(Exception):
    """What a block raises where it is told to."""


class Block(nn.Module):
    """One block of some size; it runs others of its stack within itself, and raises, as it is told."""

    def __init__(self, hidden, stack):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.register_buffer("runs", torch.zeros(()))
        self._stack = [stack]  # in a list: no submodule

    def forward(self, x, inner=(), look=None, depth=1):
        if look is not None and x.device.type == "sim":
            look(depth)
        hidden = torch.relu(self.up(x))
        x = self._stack[0].run(x, inner, look, depth + 1)
        self.runs.add_(1)
        return x + torch.tanh(self.down(hidden)) + self.runs / 64


class Stack(nn.Module):
    """Blocks of different sizes in two containers, which run in the order that a program says."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH)
        blocks = [Block(8 * (1 + (seed + 3 * index) % 5), self) for index in range(DEPTH)]
        self.first, self.second = nn.ModuleList(blocks[:3]), nn.ModuleList(blocks[3:])
        self.requires_grad_(False)

    def run(self, x, program, look=None, depth=1):
        for index, inner, end in program:
            block = _blocks(self)[index]
            x = block(x, inner, look, depth)
            if end == "raise":
                raise ToldToError(str(index))
            if end == "interrupt":
                raise KeyboardInterrupt(str(index))
            if end == "stop":
                return x
        return x

    def forward(self, x, program, look=None):
        return self.run(torch.sigmoid(self.embed(x)), program, look)


class Pipe(OmniOffloadMixin):
    """Two DiTs and an encoder that stream, in the order that a script says."""

    _dit_modules = ["transformer", "transformer_2"]
    _encoder_modules = ["text_encoder"]
    _offload_plan = OffloadPlan(
        block_attrs={"transformer": ("first", "second"), "transformer_2": ("first", "second")},
        encoder_block_attrs={"text_encoder": ("first", "second")},
    )

    def __init__(self):
        for seed, name in enumerate(STACKS):
            setattr(self, name, Stack(seed))

    def __call__(self, x, script, look=None):
        for name, program in script:
            x = getattr(self, name)(x, program, look)
        return x


def _blocks(stack):
    return *stack.first, *stack.second


BLOCKS = st.integers(0, DEPTH - 1)


def _programs(within=3):
    """Programs: blocks, each with those that run within it and what happens after it."""
    ends = st.sampled_from([None] * 24 + ["raise", "interrupt", "stop"])
    nothing = st.just(())
    inner = _programs(within - 1) if within else nothing
    node = st.tuples(BLOCKS, st.one_of(nothing, nothing, nothing, inner), ends)
    straight = st.just(tuple((index, (), None) for index in range(DEPTH)))
    return st.one_of(straight, st.lists(node, min_size=1, max_size=6).map(tuple))


def _deepest(program):
    return max((1 + _deepest(inner) for _, inner, _ in program), default=0)


SCRIPTS = st.lists(st.tuples(st.sampled_from(STACKS), _programs()), min_size=1, max_size=5)
NAMES = st.sampled_from(STACKS)


def _settings(residents, budget, *, leading, **keys):
    options = {"resident_placement": "leading"} if leading else {}
    if residents is not None:
        options["resident_layers"] = residents
    if options:
        keys["layer_options"] = {"dit": options, "text_encoder": options}
    return keys if budget is None else {**keys, "device_memory": budget}


SETTINGS = st.builds(
    _settings,
    st.sampled_from([None, 0, 1, 2, DEPTH]),
    st.sampled_from([None, None, 13000, 18000, 25000, 60000]),
    slots=st.sampled_from([2, 3, 4]),
    pin_memory=st.booleans(),
    keep_between_calls=st.booleans(),
    leading=st.booleans(),
)


def _outcome(work):
    """What a call gave: a tensor, or the error."""
    try:
        return work().cpu()
    except (ToldToError, KeyboardInterrupt, OffloadStateError) as error:
        return type(error), str(error)


class Streaming(RuleBasedStateMachine):
    """A pipeline, its resident twin, and whatever is done to both."""

    @initialize(settings=SETTINGS)
    def start(self, settings):
        self.pipe, self.twin = Pipe(), Pipe()
        self.objects = self._objects()
        self.before = sim.allocated(), sim.pinned_bytes()
        self.keys = {}
        self.enable(settings)

    def _of(self, name):
        return getattr(self.pipe, name)

    def _objects(self):
        return [id(tensor) for name in STACKS for tensor in (*self._of(name).parameters(), *self._of(name).buffers())]

    @property
    def enabled(self):
        return self.pipe.offload_backend is not None

    @property
    def slots(self):
        return self.keys.get("slots", 3)

    def _look(self, depth):
        """In every block: no more blocks have room on the device than there are slots, but for those that run within others."""
        rings = [member.owner.residency.ring for member in self.pipe.offload_backend._rotation.members.values()]
        there = [sum(block.slot is not None for block in ring.blocks.values()) for ring in rings]
        assert max(there) <= max(self.slots, depth)
        if "device_memory" not in self.keys:  # one ring at a time
            assert sum(there) <= max(self.slots, depth)

    def _compare(self, programs, run):
        got, want = _outcome(lambda: run(self.pipe, self._look if self.enabled else None)), _outcome(lambda: run(self.twin, None))
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
            assert torch.equal(got, want)
            return
        too_deep = "device_memory" in self.keys and max(map(_deepest, programs)) > self.slots
        if too_deep and not isinstance(got, torch.Tensor) and got[0] is OffloadStateError:
            assert "raise 'slots'" in got[1]
            for name in STACKS:  # the twin ran on
                getattr(self.twin, name).load_state_dict(self._of(name).state_dict())
            return
        assert got == want

    # ---- what is done --------------------------------------------------------------------------------------------------------

    @rule(script=SCRIPTS, seed=st.integers(0, 3))
    def call(self, script, seed):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self._compare([program for _, program in script], lambda pipe, look: pipe(x, script, look))
        if self.enabled and not self.keys.get("keep_between_calls"):
            self._freed()

    @rule(name=NAMES, program=_programs())
    def use_a_component(self, name, program):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(5))
        with torch.inference_mode():
            self._compare([program], lambda pipe, look: getattr(pipe, name)(x, program, look))

    @rule(name=NAMES, index=BLOCKS, inner=_programs(1))
    def use_a_block(self, name, index, inner):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(6))

        def run(pipe, look):
            stack = getattr(pipe, name)
            return _blocks(stack)[index](x, inner, look)

        with torch.no_grad():
            self._compare([((index, inner, None),)], run)

    @rule(name=NAMES, index=BLOCKS, way=st.sampled_from(["in place", "by data", "new object"]), seed=st.integers(0, 3))
    def edit_between_two_uses(self, name, index, way, seed):
        one = ((index, (), None), ((index + seed) % DEPTH, (), None))
        self.use_a_component(name, one)
        for pipe in (self.pipe, self.twin):
            block = _blocks(getattr(pipe, name))[index]
            with torch.no_grad():
                if way == "in place":
                    block.up.weight.add_(0.125)
                elif way == "by data":
                    block.up.weight.data.mul_(1.25)
                else:
                    block.up.bias = nn.Parameter(block.up.bias.detach() + 1, requires_grad=False)
        self.objects = self._objects()
        self.use_a_component(name, one)

    @precondition(lambda self: not self.enabled)
    @rule(settings=SETTINGS)
    def enable(self, settings):
        self.keys = dict(settings)
        try:
            self.pipe.enable_omni_offload("layer", device="sim", **self.keys)
        except OffloadConfigError:
            assert "device_memory" in self.keys
            self.keys = {}

    @precondition(lambda self: self.enabled)
    @rule(what=st.sampled_from(["release", "refresh"]))
    def tell(self, what):
        getattr(self.pipe.offload_backend, what)()
        if what == "release":
            self._freed()

    @precondition(lambda self: self.enabled)
    @rule()
    def disable(self):
        self.pipe.disable_omni_offload()
        self.keys = {}
        self._freed(pinned=True)

    # ---- what holds ----------------------------------------------------------------------------------------------------------

    def _freed(self, *, pinned=False):
        if sim.allocated() != self.before[0]:
            gc.collect()  # what an error's traceback held
        assert sim.allocated() == self.before[0]
        assert not pinned or sim.pinned_bytes() == self.before[1]

    @invariant()
    def weights_are_whole(self):
        if "pipe" not in self.__dict__:
            return
        for name in STACKS:
            ours, theirs = self._of(name).state_dict(), getattr(self.twin, name).state_dict()
            assert all(map(torch.equal, ours.values(), theirs.values()))
        assert self.objects == self._objects()

    @invariant()
    def budgets_hold(self):
        if "pipe" in self.__dict__ and "device_memory" in self.keys:
            assert self.pipe.offload_report.peak_device_bytes <= self.keys["device_memory"]

    @invariant()
    def no_race(self):
        assert sim.races() == []

    def teardown(self):
        if "pipe" in self.__dict__:
            self.pipe.disable_omni_offload()
            self.keys = {}
            self.weights_are_whole()
            self._freed(pinned=True)


def _run(examples, steps, *, derandomize):
    run_state_machine_as_test(
        Streaming,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # shrinking takes minutes: what failed is printed step by step, and can be cut by hand
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def device(device):
    """Virtual time: random use is many calls."""
    sim.configure(mode="virtual")
    return device


@pytest.mark.usefixtures("device")
def test_any_use():
    """Two DiTs and an encoder under random orders, nesting, failures, edits and settings equal their resident twins, and leave nothing."""
    _run(examples=14, steps=14, derandomize=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("device")
def test_any_use_for_long():
    """As above, at random, for some minutes."""
    _run(examples=600, steps=30, derandomize=False)


@pytest.mark.usefixtures("device")
def test_resident_blocks_outside_of_their_component():
    """A resident block that is called by itself brings its component along, as one that streams does."""
    pipe, twin, x = Pipe(), Pipe(), torch.randn(2, WIDTH)
    options = {"dit": {"resident_layers": DEPTH}}
    with pipe.enable_omni_offload("layer", device="sim", layer_options=options), torch.no_grad():
        for ours, theirs in zip(_blocks(pipe.transformer), _blocks(twin.transformer), strict=True):
            out = ours(x)
            assert out.device.type == "sim"
            assert torch.equal(out.cpu(), theirs(x))
