"""A block's tensors as one: one copy, one pass of bindings; where that cannot be, group by group, with the same result."""

import contextlib

import pytest
import torch
from interrupting import Interrupter, lines
from torch import nn

from omni_offload import ModuleResidency
from omni_offload.accelerator import Accelerator
from omni_offload.backends.streamed import StreamedResidency
from omni_offload.residency import Partition, ResidencyContext
from omni_offload.testing import sim


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.down(self.up(x)))


class Stack(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def stream(device):
    """Make a streamed residency of a stack, and give it up afterwards."""
    sim.configure(mode="virtual")
    made = []

    def make(stack=None, slots=3):
        stack = (stack or Stack()).requires_grad_(False)
        context = ResidencyContext(Accelerator.of(device))
        partition = Partition(stack, [(f"stack.blocks.{index}", block) for index, block in enumerate(stack.blocks)])
        residency = StreamedResidency(partition, slots=slots, name="stack", context=context)
        residency.prepare()
        made.append(residency)
        return residency

    yield make
    for residency in made:
        residency.restore()
        residency._context.close()


def run(residency, y):
    """One pass over all blocks, as the hooks make it."""
    residency.validate()
    residency.fetch(validated=True)
    residency.bind()
    y = through(residency, y)
    residency.unbind()
    return y


def through(residency, y):
    """What runs while the rest is bound."""
    (stack,) = residency.modules
    y = stack.embed(y.to(residency.device))
    for index, block in enumerate(stack.blocks):
        residency.ring.enter(index)
        y = block(y)
        residency.ring.leave(index)
    return y.cpu()


Y = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))


def test_a_block_travels_as_one_copy(stream, monkeypatch):
    """Its weights lie together in the pinned arena and in the slot."""
    residency, copies = stream(), []
    own = Accelerator.copy
    monkeypatch.setattr(
        Accelerator, "copy", lambda self, target, source, **keys: (copies.append(source.numel()), own(self, target, source, **keys))[1]
    )
    run(residency, Y)
    copies.clear()
    run(residency, Y)
    assert copies == [residency.slot_bytes] * 5


def test_blocks_of_one_kind_share_the_views_of_a_slot(stream):
    """Nothing is made for a block that another of its kind was in the slot before."""
    stack = Stack()
    stack.blocks[3].up = nn.Linear(16, 16, bias=False)
    residency = stream(stack)
    for _ in range(3):
        run(residency, Y)
    assert [len(slot.views) for slot in residency.ring.pool] == [2, 2, 2]


def test_a_pass_allocates_no_tensor_and_waits_for_no_block(stream, monkeypatch):
    """In steady state no memory is taken on the device or the host; the host waits at most once, when the pass ends."""
    residency, waits = stream(), []
    for _ in range(3):
        run(residency, Y)
    before = sim.allocation_count()
    monkeypatch.setattr(Accelerator, "block_on", lambda _, event: waits.append(event))
    residency.validate()
    residency.fetch(validated=True)
    residency.bind()
    with _NoNewTensors():
        for _ in range(2):
            for index in residency.ring.blocks:
                residency.ring.enter(index)
                residency.ring.leave(index)
    assert waits == []
    assert sim.allocation_count() == before
    residency.unbind()
    assert len(waits) <= 1


class _NoNewTensors(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuse operations that give a tensor which is none of their arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        assert any(found is one for one in (*args, *(kwargs or {}).values())), func
        return found


def test_an_edit_through_data_of_what_waits_in_a_slot(stream):
    """What was fetched for the next pass is fetched again if its master was edited past its version counter meanwhile."""
    residency = stream()
    (stack,) = residency.modules
    run(residency, Y)
    for index in range(3):
        assert residency.blocks[index].current
        stack.blocks[index].down.weight.data.mul_(1.5)
    want = Stack()
    for index in range(3):
        want.blocks[index].down.weight.data.mul_(1.5)
    with torch.no_grad():
        assert torch.equal(run(residency, Y), want(Y))


@pytest.mark.parametrize("how", ["by data", "in place"])
def test_weights_written_by_their_block(stream, how):
    """A weight that its block writes on the device is copied back, alone, and is in force in the next pass."""
    residency, want = stream(), Stack()
    for (stack,) in (residency.modules, [want]):
        block, own = stack.blocks[1], type(stack.blocks[1]).forward

        def forward(y, block=block, own=own):
            if how == "in place":
                block.down.bias.add_(0.5)
            else:
                block.down.bias.data = block.down.bias.data + 0.5
            return own(block, y)

        block.forward = forward
    with torch.no_grad():
        for _ in range(3):
            before = residency.counters.bytes_out
            assert torch.equal(run(residency, Y), want(Y))
            assert residency.counters.bytes_out - before <= 64
    del residency.modules[0].blocks[1].forward


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_residency_that_lets_go(stream, fails):
    """Whether it had a weight elsewhere, or found no room for it: the block has it at its next use, also where no pass began since."""
    residency = stream(Stack(3))  # each block keeps its slot
    (stack,) = residency.modules
    with torch.no_grad():
        for _ in range(2):
            run(residency, Y)
        residency.validate()
        residency.fetch(validated=True)
        residency.bind()
        for other in (None, ModuleResidency(stack.blocks[0].up, residency.device, context=residency._context)):
            if other is not None:
                sim.configure(fail_alloc_in=0 if fails else -1)
                with pytest.raises(torch.OutOfMemoryError) if fails else contextlib.nullcontext():
                    other.load()
                sim.configure(fail_alloc_in=-1)
                other.offload()
                other.drop()
            y = stack.embed(Y.to(residency.device))
            for index, block in enumerate(stack.blocks):
                residency.ring.enter(index)
                y = block(y)
                residency.ring.leave(index)
            assert torch.equal(y.cpu(), Stack(3)(Y))
        residency.unbind()
    residency.restore()
    other.restore()


@pytest.mark.parametrize("bound", [False, True])
def test_a_second_residency_that_knows_a_weight(stream, bound):
    """Once another residency has a tensor of a block, the block's tensors are looked at one by one, also where that happens in its use."""
    residency = stream()
    (stack,) = residency.modules
    run(residency, Y)
    residency.validate()
    residency.fetch(validated=True)
    residency.bind()
    if bound:
        residency.ring.enter(0)
    other = ModuleResidency(stack.blocks[0].up, residency.device, context=residency._context)
    other.load()
    if not bound:
        residency.ring.enter(0)
    residency.ring.leave(0)
    assert stack.blocks[0].up.weight.device == residency.device  # the other one's still
    assert stack.blocks[0].down.weight.device.type == "cpu"
    other.offload()
    residency.unbind()
    assert stack.blocks[0].up.weight.device.type == "cpu"
    with torch.no_grad():
        assert torch.equal(run(residency, Y), Stack()(Y))
    residency.restore()
    other.restore()


def test_a_second_residency_has_room_of_its_own(stream):
    """What it fetched is not in a slot, which other blocks are copied into; the block that has the weight uses that room as well."""
    residency = stream()
    (stack,) = residency.modules
    with torch.no_grad():
        run(residency, Y)
        residency.validate()
        residency.fetch(validated=True)  # the first block waits in a slot
        others = [ModuleResidency(stack.blocks[index].up, residency.device, context=residency._context) for index in (0, 4)]
        for other in others:
            other.fetch()
        residency.bind()
        y = through(residency, Y)
        residency.unbind()
        assert torch.equal(y, Stack()(Y))
        for other, index in zip(others, (0, 4), strict=True):
            other.bind()
            assert torch.equal(stack.blocks[index].up.weight.cpu(), Stack().blocks[index].up.weight)
            other.offload()
        assert torch.equal(run(residency, Y), Stack()(Y))
    residency.restore()
    for other in others:
        other.restore()


def test_refresh_of_what_waits_in_a_slot(stream):
    """After `forget_copies` every block is copied again, and stays one."""
    residency = stream(Stack(3))
    for _ in range(2):
        run(residency, Y)
    before = residency.counters.bytes_in
    run(residency, Y)
    assert residency.counters.bytes_in == before
    residency.forget_copies()
    run(residency, Y)
    assert residency.counters.bytes_in - before >= 3 * residency.slot_bytes


#: Files that serve blocks.
SERVING = ("/residency/block.py", "/residency/bundle.py", "/residency/slots.py", "/backends/block_ring.py")


@pytest.mark.traced
@pytest.mark.parametrize("passes", [0, 1], ids=["first pass", "second pass"])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_pass_interrupted_at_every_line(stream, stride, passes):
    """After an interrupt at any line of a pass and its repair, every weight is its master, and the next pass is right."""
    with torch.no_grad():
        want = Stack(4)(Y)
        residency = stream(Stack(4))
        (stack,) = residency.modules
        run(residency, Y)
        total = lines(lambda: run(residency, Y), SERVING)
        assert total > 200
        for at in range(0, total, stride):
            residency.drop()
            for _ in range(passes):
                run(residency, Y)
            with Interrupter(at, within=SERVING), contextlib.suppress(KeyboardInterrupt):
                run(residency, Y)
            residency.unbind(force=True)
            assert {parameter.device.type for parameter in stack.parameters()} == {"cpu"}, at
            assert torch.equal(stack(Y), want), at
            assert torch.equal(run(residency, Y), want), at


def test_a_block_bound_to_a_copy_that_is_stale(stream):
    """It is bound group by group, and fetched again for its next use."""
    residency = stream()
    for _ in range(2):  # the second time as one
        residency.forget_copies()
        residency.fetch()
        residency.forget_copies()
        block = residency.blocks[0]
        block.bind()
        assert block.module.up.weight.device == residency.device
        block.unbind()
        assert not block.current
        with torch.no_grad():
            assert torch.equal(run(residency, Y), Stack()(Y))


def test_an_edit_on_the_device_that_is_told(stream):
    """What is marked as written is copied back when the block is left, whatever its version counters say."""
    residency = stream()
    run(residency, Y)
    residency.fetch()
    residency.bind()
    residency.ring.enter(0)
    block = residency.blocks[0]
    block.module.up.weight.data.fill_(2.0)
    block.mark_written()
    residency.ring.leave(0)
    residency.unbind()
    assert torch.equal(block.module.up.weight, torch.full((16, 16), 2.0))


def test_a_slot_that_was_freed_has_no_room(stream):
    """Nobody gets a part of memory that was given back."""
    residency = stream()
    run(residency, Y)
    slot = next(iter(residency.ring.pool))
    residency.drop()
    with pytest.raises(RuntimeError, match="slot was freed"):
        slot.take(None, 0, 64)


def test_a_pass_that_runs_is_not_begun_again(stream):
    """Bound once more in the middle of a pass, the ring goes on with it, and the whole of it is what is expected next time."""
    residency = stream()
    (stack,) = residency.modules
    run(residency, Y)
    residency.fetch()
    residency.bind()
    for index in range(len(residency.ring.blocks)):
        residency.ring.enter(index)
        residency.ring.leave(index)
        if index == 1:
            residency.bind()
    residency.unbind()
    misses = residency.counters.misses
    with torch.no_grad():
        assert torch.equal(run(residency, Y), Stack()(Y))
    assert residency.counters.misses == misses
    assert stack.blocks[0].up.weight.device.type == "cpu"


def test_a_weight_that_was_given_other_memory_between_passes(stream):
    """The next pass runs on the memory that a weight of a block was given, also where the old copy waits in a slot."""
    residency, edited = stream(), Stack()
    (stack,) = residency.modules
    run(residency, Y)
    for one in (stack, edited):
        for block in one.blocks:
            block.up.weight.data = torch.full_like(block.up.weight, 0.125)
    with torch.no_grad():
        assert torch.equal(run(residency, Y), edited(Y))


def test_whether_a_block_of_single_groups_is_bound(stream):
    """A block whose tensors are looked at one by one is bound while it runs, as any block."""
    residency = stream()
    (stack,) = residency.modules
    other = ModuleResidency(stack.blocks[0].up, residency.device, context=residency._context)
    other.load()
    residency.validate()
    residency.fetch(validated=True)
    residency.bind()
    block = residency.ring.blocks[0]
    assert not block.bound
    residency.ring.enter(0)
    assert block.bound
    residency.ring.leave(0)
    assert not block.bound
    residency.unbind()
    other.restore()


def test_a_restored_residency_streams_again(stream):
    """What was put into a block after it was restored is streamed with it."""
    stack = Stack()
    residency = stream(stack)
    run(residency, Y)
    residency.restore()
    with torch.no_grad():
        stack.blocks[2].up = nn.Linear(16, 16)
        expected = stack(Y)
        residency.prepare()
        assert torch.equal(run(residency, Y), expected)
        assert residency.blocks[2].padded_bytes == residency.slot_bytes


def test_a_tie_across_blocks_before_the_end(stream):
    """A weight that a block came to share with another just before the end is whole, on the host, in memory that is not pinned."""
    stack = Stack()
    residency = stream(stack)
    run(residency, Y)
    weight, value = stack.blocks[0].up.weight, stack.blocks[0].up.weight.clone()
    stack.blocks[3].up.weight = weight
    residency.restore()
    residency._context.close()
    assert stack.blocks[0].up.weight is weight is stack.blocks[3].up.weight
    assert torch.equal(weight, value)
    assert not any(tensor.is_pinned() or tensor.device.type != "cpu" for tensor in stack.parameters())
    assert residency._context.host.pinned_bytes == 0
