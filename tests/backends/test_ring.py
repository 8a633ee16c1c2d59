"""What a ring copies, keeps and waits for, counted: in the order that it has learned nothing is missed, nothing is copied twice."""

import itertools

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan
from omni_offload.accelerator import Accelerator
from omni_offload.errors import OffloadStateError
from omni_offload.residency import SlotPool
from omni_offload.residency.host import ByteMeter
from omni_offload.testing import sim

WIDTH, DEPTH = 32, 6


class Block(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.fail, self.writes = False, None
        self.inner = []

    def forward(self, x):
        if self.fail:
            raise ValueError("told to")
        x = torch.tanh(super().forward(x))
        if self.writes is not None:
            self.writes(self)
        for block in self.inner:
            x = block(x)
        return x


class Stack(nn.Module):
    """Runs its blocks in the order that it is given."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(DEPTH))
        self.order = list(range(DEPTH))

    def forward(self, x):
        x = self.embed(x).to(self.blocks[0].weight.dtype)
        for index in self.order:
            x = self.blocks[index](x)
        return x


class Ring:
    """A pipeline that streams, and what its ring did."""

    def __init__(self, pipe, plain, backend):
        self.pipe, self.plain, self.backend = pipe, plain, backend
        self.residency = backend._rotation.members["transformer"].owner.residency
        self.block_bytes = self.residency.blocks[0].padded_bytes
        self.y = torch.randn(2, WIDTH)

    def count(self):
        part = next(part for part in self.backend.report().components if part.name == "transformer")
        return part.misses, part.bytes_in, part.wasted_copies

    def run(self, order=None):
        """Run one pass, right; return its misses, the blocks it copied, and the copies that were for nothing."""
        for one in (self.pipe, self.plain):
            one.transformer.order = list(range(DEPTH)) if order is None else order
        before = self.count()
        assert torch.equal(self.pipe.transformer(self.y).cpu(), self.plain.transformer(self.y))
        misses, nbytes, wasted = (now - then for now, then in zip(self.count(), before, strict=True))
        return misses, nbytes / self.block_bytes, wasted

    def tenants(self):
        return sorted(slot.tenant.index for slot in self.residency.ring.pool if slot.tenant is not None)


@pytest.fixture(scope="session")
def make(kit):
    class Streaming(kit.Pipe):
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

        def __init__(self, seed=0):
            super().__init__(seed)
            self.transformer = Stack().requires_grad_(False)

        def __call__(self, x):
            return self.transformer(x[:, :WIDTH])

    return Streaming


@pytest.fixture
def ring(make, device):
    """One after its first pass; it keeps what it has between the calls."""
    sim.configure(mode="virtual")
    pipe, plain = make(), make()
    with pipe.enable_omni_offload("layer", device=device, keep_between_calls=True) as backend, torch.no_grad():
        made = Ring(pipe, plain, backend)
        made.run()
        yield made


def test_a_pass_in_the_learned_order_copies_every_block_once(ring):
    """Nothing is missed, nothing is copied twice, and when it ends the first blocks of the next pass are on their way."""
    for order in (None, [5, 4, 3, 2, 1, 0], [0, 1, 0, 2, 0, 3, 4, 5]):
        ring.run(order)
        ring.run(order)
        misses, copies, wasted = ring.run(order)
        assert (misses, wasted) == (0, 0)
        assert copies == DEPTH
        assert ring.tenants() == sorted(list(dict.fromkeys(order or range(DEPTH)))[:3])


def test_the_first_pass(make, device):
    """Blocks are fetched before they run from the first pass on; what was fetched for a pass that does not come is counted."""
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, keep_between_calls=True) as backend, torch.no_grad():
        ring = Ring(pipe, make(), backend)
        ring.run()
        part = next(part for part in backend.report().components if part.name == "transformer")
        assert (part.prefetch_hits, part.misses, part.wasted_copies) == (DEPTH, 1, 0)
        backend.release()
        assert ring.count()[2] == 3


def test_blocks_that_fit_the_slots_stay(ring):
    """A pass over no more blocks than there are slots copies nothing once it is learned."""
    for _ in range(2):
        ring.run([1, 3, 5])
    assert ring.run([1, 3, 5]) == (0, 0, 0)


def test_a_pass_that_failed_is_not_learned(ring):
    """The next one runs as the last whole one did, and misses nothing."""
    order = [5, 4, 3, 2, 1, 0]
    for _ in range(2):
        ring.run(order)
    ring.pipe.transformer.blocks[3].fail = True
    with pytest.raises(ValueError, match="told to"):
        ring.pipe.transformer(ring.y)
    ring.pipe.transformer.blocks[3].fail = False
    assert ring.run(order)[0] == 0


def test_skipped_blocks_cost_one_miss(ring):
    """Behind a gap the place in the sequence is found again, the next time it comes, not the first: what follows is there in time."""
    assert ring.run([0, 4, 5])[0] == 1
    order = [0, 1, 2, 0, 3, 4]
    for _ in range(2):
        ring.run(order)
    assert ring.run([0, 1, 0, 3, 4])[0] == 0


def test_the_block_that_is_needed_last_makes_room(ring):
    """For a block that was not expected, what runs soonest is not thrown out."""
    assert ring.tenants() == [0, 1, 2]
    before = ring.count()
    ring.pipe.transformer.blocks[4](ring.y)
    misses, nbytes, wasted = (now - then for now, then in zip(ring.count(), before, strict=True))
    assert ring.tenants() == [0, 1, 5]
    assert (misses, nbytes / ring.block_bytes, wasted) == (1, 3, 2)


def test_memory_beyond_the_slots_goes_with_its_block(ring):
    """A block too deep within others gets memory of its own while it runs, and no longer."""
    held = ring.residency.meter.current
    for one in (ring.pipe, ring.plain):
        blocks = one.transformer.blocks
        for outer, inner in itertools.pairwise(blocks):
            outer.inner = [inner]
    ring.run([0])
    assert ring.residency.meter.peak == held + 3 * ring.block_bytes
    assert ring.residency.meter.current == held
    ring.backend.release()
    assert ring.residency.meter.current == 0


def test_a_block_runs_twice_at_once(ring):
    """A block within itself is bound until the outermost of its uses is over, and is entered once."""
    for one in (ring.pipe, ring.plain):
        block = one.transformer.blocks[2]
        own, deep = block.forward, []

        def forward(y, block=block, own=own, deep=deep):
            deep.append(1)
            y = block(y) if len(deep) % 2 else y
            return own(y)

        block.forward = forward
    ring.backend.disable()
    with ring.pipe.enable_omni_offload("layer", device="sim", keep_between_calls=True) as backend:
        again = Ring(ring.pipe, ring.plain, backend)
        again.run()
        assert again.run() == (0, DEPTH, 0)


def test_between_passes_everything_is_the_masters(ring, monkeypatch):
    """After a pass, a failed one and an interrupted one every weight is its master, and a reader finds it whole."""
    masters = {name: tensor.data_ptr() for name, tensor in ring.pipe.transformer.state_dict().items()}
    ring.pipe.transformer.blocks[3].fail = True
    with pytest.raises(ValueError, match="told to"):
        ring.pipe.transformer(ring.y)
    ring.pipe.transformer.blocks[3].fail = False
    assert {name: tensor.data_ptr() for name, tensor in ring.pipe.transformer.state_dict().items()} == masters
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(ring.residency.ring), "leave", _interrupt)
        ring.pipe(torch.randn(2, 2 * WIDTH))
    assert {name: tensor.data_ptr() for name, tensor in ring.pipe.transformer.state_dict().items()} == masters
    ring.run()
    assert {name: tensor.data_ptr() for name, tensor in ring.pipe.transformer.state_dict().items()} == masters
    assert not ring.residency.ring.running


def _interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("mode", ["threads", "virtual"])
def test_masters_are_free_when_a_pass_is_over(ring, mode):
    """The host has waited for the copies that the pass ran on: an edit of what is not fetched for the next one meets none of them."""
    sim.configure(mode=mode, copy_latency=1e-3)
    with sim.watch_host():
        for _ in range(2):
            ring.pipe.transformer(ring.y)
            for one in (ring.pipe, ring.plain):
                one.transformer.blocks[DEPTH - 1].weight.add_(0.25)
    assert sim.races() == []
    sim.configure(copy_latency=0.0)
    ring.run()


def test_an_interrupted_wait_for_copies_is_waited_again(ring, monkeypatch):
    """Masters are not given back to whoever edits them before the copies that read them have landed, also where the wait was cut short."""
    sim.configure(mode="virtual", copy_latency=1e-3)
    waited = []
    own = Accelerator.block_on

    def block_on(self, event):
        waited.append(event)
        if len(waited) == 1:
            raise KeyboardInterrupt
        own(self, event)

    monkeypatch.setattr(Accelerator, "block_on", block_on)
    with pytest.raises(KeyboardInterrupt):
        ring.pipe.transformer(ring.y)
    assert waited[1] is waited[0]
    sim.configure(copy_latency=0.0)
    ring.run()


def test_edits_of_every_kind_are_seen_in_every_place(ring):
    """In place, through `.data` and by a new object, in blocks that lie in slots, in those that do not, and in the rest."""
    for edit in (lambda p: p.add_(0.1), lambda p: p.data.mul_(1.5)):
        for one in (ring.pipe, ring.plain):
            for parameter in one.transformer.parameters():
                edit(parameter)
        ring.run()
    for one in (ring.pipe, ring.plain):
        one.transformer.blocks[0].weight[17, 5] += 1  # one number, of which samples tell nothing
    ring.run()
    for one in (ring.pipe, ring.plain):
        for block in one.transformer.blocks:
            block.weight = nn.Parameter(block.weight.detach() * 0.5, requires_grad=False)
    ring.run()


def test_small_buffers_stay(make, device):
    """Buffers of up to 1 MiB are with the rest: they are often written, and are on the device while any block runs."""
    pipe, seen = make(), []
    for block in pipe.transformer.blocks:
        block.register_buffer("count", torch.zeros(4))
        block.register_forward_pre_hook(lambda *_: seen.append({one.count.device.type for one in pipe.transformer.blocks}))
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        pipe.transformer(torch.randn(2, WIDTH))
    assert seen == [{device.type}] * DEPTH


def test_blocks_of_one_size_and_other_strides(make, device):
    """A weight that lies transposed in one block is bound so there, and not as it is in the others."""
    pipe, plain = make(), make()
    for one in (pipe, plain):
        block = one.transformer.blocks[3]
        block.weight = nn.Parameter(block.weight.detach().t().contiguous().t(), requires_grad=False)
    with pipe.enable_omni_offload("layer", device=device, keep_between_calls=True) as backend, torch.no_grad():
        ring = Ring(pipe, plain, backend)
        for _ in range(2):
            ring.run()


def test_refresh_reads_blocks_again(ring):
    """An edit of one number through `.data` in a block that lies in a slot, which nothing shows, is in force after refresh()."""
    assert 0 in ring.tenants()
    for one in (ring.pipe, ring.plain):
        one.transformer.blocks[0].weight.data[17, 5] += 1
    ring.backend.refresh()
    ring.run()


def test_a_tie_that_comes_while_enabled(ring):
    """Weights that two blocks come to share go to the rest, where both find them."""
    for one in (ring.pipe, ring.plain):
        one.transformer.blocks[4].weight = one.transformer.blocks[0].weight
    ring.run()
    for one in (ring.pipe, ring.plain):
        one.transformer.blocks[0].weight.add_(0.25)
    ring.run()


@pytest.mark.parametrize("kind", ["in place", "new tensor", "without a counter"])
def test_weights_written_on_the_device_come_back(ring, kind):
    """A block that changes its weights in forward is written back before its slot is another's, in every pass."""

    def write(block):
        if kind == "new tensor":
            block.bias.data = block.bias.data + 0.125
            return
        with torch.inference_mode():
            block.bias.add_(0.125)

    for one in (ring.pipe, ring.plain):
        if kind == "without a counter":
            with torch.inference_mode():
                one.transformer.blocks[1].bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        one.transformer.blocks[1].writes = write
    for _ in range(3):
        ring.run()
    ring.backend.disable()
    assert all(map(torch.equal, ring.pipe.transformer.parameters(), ring.plain.transformer.parameters()))


def test_slots_grow_with_the_blocks(ring):
    """Blocks that were cast to a wider type between passes take turns in slots of their new size, as many as before."""
    for one in (ring.pipe, ring.plain):
        one.transformer.blocks.double()
    ring.run()
    before, ring.block_bytes = ring.block_bytes, ring.residency.blocks[0].padded_bytes
    pool = ring.residency.pool
    assert ring.block_bytes == 2 * before
    assert (len(pool), pool.nbytes) == (3, 3 * ring.block_bytes)
    assert ring.run() == (0, DEPTH, 0)


def test_slots_are_there_until_the_last_ring_is_gone(device):
    """A ring that closes leaves them to the others; those that are kept for one that does not come go when they are let go."""
    pool = SlotPool(Accelerator.of(device), ByteMeter())
    first, second = object(), object()
    pool.open(first, 2, 128)
    pool.open(second, 2, 64)
    pool.close(first)
    assert (len(pool), pool.nbytes) == (2, 256)
    pool.keep()
    pool.close(second)
    assert len(pool) == 2
    pool.let_go()
    assert len(pool) == 0


def test_a_budget_refuses_memory_beyond_the_slots(make, device):
    """The call is refused by name, whatever ran within what."""
    pipe = make()
    blocks = pipe.transformer.blocks
    for outer, inner in itertools.pairwise(blocks):
        outer.inner = [inner]
    options = {"dit": {"resident_layers": 0}}
    keys = {"device_memory": "1MiB", "layer_options": options}
    with pipe.enable_omni_offload("layer", device=device, **keys), torch.no_grad(), pytest.raises(OffloadStateError, match="raise 'slots'"):
        pipe(torch.randn(2, 64))
