"""Residents are chosen anew once a pass was timed: where that pays, once, within the budget, and with everything else left in place."""

import itertools

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan
from omni_offload.accelerator import clock
from omni_offload.backends import residents
from omni_offload.backends.block_times import TimedPass
from omni_offload.backends.residents import ResidentChoice
from omni_offload.schedule import least_bytes
from omni_offload.testing import sim

#: The levels of a UNet: their bytes, and how long they compute (ms). Outer ones compute much and weigh little.
SIZES = [64 * size for size in (42, 146, 555, 247, 385, 643, 1024, 283, 75)]
TIMES = (136, 85, 79, 9, 15, 32, 189, 208, 246)
#: All copies take four times as long as all computations.
GBPS = sum(SIZES) / 4e9


class Block(nn.Module):
    """Takes its time."""

    def __init__(self, nbytes, milliseconds):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, nbytes // 4), requires_grad=False)
        self.seconds, self.fails = milliseconds / 1e3, False

    def forward(self, x):
        if self.fails:
            raise ValueError("told to")
        if x.device.type == "sim":
            sim.spin(self.seconds)
        return torch.tanh(x + self.weight[: len(x)])


class Stack(nn.Module):
    """Runs its blocks in the order that it is given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, SIZES, TIMES))
        self.order = list(range(len(SIZES)))

    def forward(self, x):
        for index in self.order:
            x = self.blocks[index](x)
        return x


@pytest.fixture(scope="session")
def make(kit):
    class Streaming(kit.Pipe):
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

        def __init__(self, seed=0):
            super().__init__(seed)
            self.transformer = Stack()
            self.steps = 6

        def __call__(self, x):
            for step in range(self.steps):
                x = self.on_step(step, self.transformer(x))
            return x

    return Streaming


@pytest.fixture
def device(device):
    sim.configure(mode="virtual", h2d_gbps=GBPS, launch=0.0, copy_latency=0.0)
    return device


def budget(share):
    """Part of the way from the least that the blocks take to everything."""
    costs = ResidentChoice(3, overlaps=True)._costs(SIZES, number=None, nbytes=None)[1]
    least = least_bytes(costs, 3)
    return least + round(share * (sum(SIZES) - least))


@pytest.fixture
def keys():
    return {"device_memory": budget(0.75)}


def residency_of(backend):
    return backend._rotation.members["transformer"].owner.residency


def kept(backend):
    residency = residency_of(backend)
    return {index for index in range(len(SIZES)) if index not in residency.ring.blocks}


def counts(backend):
    return next(part for part in backend.report().components if part.name == "transformer")


def run(pipe, device, steps=6):
    """Run a call; return what was resident after each step, and the bytes copied until then."""
    seen = []
    pipe.steps = steps
    pipe.on_step = lambda _, x: (seen.append((kept(pipe.offload_backend), counts(pipe.offload_backend).bytes_in)), x)[1]
    with sim.trace() as spans:
        out = pipe(torch.ones(8, device=device))
        torch.accelerator.synchronize(device)
    ends = [span.end for span in spans if span.what == "spin"][len(SIZES) - 1 :: len(SIZES)]
    return out, seen, [last - first for first, last in itertools.pairwise(ends)]


def test_what_a_pass_took_decides(make, device, keys):
    """From the third step on a step is 30 % shorter than it would be; the output is the same, and the budget holds."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        before = kept(backend)
        assert counts(backend).costs == "assumed"
        out, seen, steps = run(pipe, device)
        assert torch.equal(out.cpu(), plain(torch.ones(8)))
        assert [now for now, _ in seen] == [before, *[kept(backend)] * 5]
        assert kept(backend) != before
        assert counts(backend).costs == "measured"
        assert backend.report().peak_device_bytes <= keys["device_memory"]
    assert steps[1:] == pytest.approx([steps[1]] * 4)
    with make().enable_omni_offload("layer", device=device, **keys) as backend:
        streamed = sum(size for index, size in enumerate(SIZES) if index not in before)
        assert steps[1] < 0.98 * streamed / (GBPS * 1e9)  # what no step goes below with the residents of before


def test_what_stays_where_it_is_is_not_copied_again(make, device, keys):
    """The pass in which residents change copies what streams, and those that come."""
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        before = kept(backend)
        _, seen, _ = run(pipe, device)
        now = kept(backend)
        slots = [SIZES[block.index] for block in residency_of(backend).ring.blocks.values()]
    copied = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(seen)]
    streamed, coming = sum(slots), sum(SIZES[index] for index in now - before)
    assert copied[2:] == [streamed] * 3
    assert coming > 0
    assert copied[0] <= streamed + coming + 3 * max(slots)  # the first ones of the next pass are fetched
    assert copied[0] < streamed + sum(SIZES[index] for index in now)


def test_afterwards_nothing_is_timed_and_nothing_allocated(make, device, keys, monkeypatch):
    """In steady state no moment is noted, no memory is taken, and the residents stay, in later calls too."""
    pipe, made = make(), []
    event = clock._timing_event
    monkeypatch.setattr(clock, "_timing_event", lambda *at: (made.append(at), event(*at))[1])
    with pipe.enable_omni_offload("layer", device=device, keep_between_calls=True, **keys) as backend, torch.no_grad():
        x = torch.ones(8, device=device)
        for _ in range(3):
            pipe.transformer(x)
        before, events = kept(backend), len(made)
        plain = Stack().to(device)
        taken = []
        for module in (plain, pipe.transformer):
            module(x)
            start = sim.allocation_count()
            module(x)
            taken.append(sim.allocation_count() - start)
        assert taken[0] == taken[1]
        assert len(made) == events > 0
        run(pipe, device)
        assert kept(backend) == before
        streamed = len(SIZES) - len(before)
        assert len(made) == events + 4 * streamed + len(before) + 1  # of its first pass: waits, uses and copies, and its end


def test_slots_of_another_size(make, device):
    """Where the largest block comes to stay, or leaves, the slots are made anew within the budget."""
    plain, pipe, most = make(), make(), budget(0.9)
    for block, seconds in zip(pipe.transformer.blocks, (0.6, 0.6, 0.005, 0.6, 0.005, 0.6, 0.005, 0.6, 0.005), strict=True):
        block.seconds = seconds
    with pipe.enable_omni_offload("layer", device=device, device_memory=most) as backend, torch.no_grad():
        before, slot = kept(backend), residency_of(backend).slot_bytes
        out, seen, _ = run(pipe, device)
        assert torch.equal(out.cpu(), plain(torch.ones(8)))
        assert seen[-1][0] != before
        assert residency_of(backend).slot_bytes != slot
        assert backend.report().peak_device_bytes <= most


@pytest.mark.parametrize("number", [2, 4])
def test_a_number_of_residents(make, device, number):
    """As many stay as were asked for, others than before."""
    pipe = make()
    sim.configure(h2d_gbps=2 * GBPS)
    with pipe.enable_omni_offload("layer", device=device, layer_options={"dit": {"resident_layers": number}}) as backend, torch.no_grad():
        before = kept(backend)
        peak = residency_of(backend).padded_bytes
        run(pipe, device)
        assert len(kept(backend)) == len(before) == number
        assert kept(backend) != before
        assert residency_of(backend).padded_bytes <= peak


def test_copies_that_would_not_pay_wait_for_the_next_call(make, device, keys, monkeypatch):
    """Within a call others are not fetched for a gain that is small beside their copies; when nothing is there they cost nothing."""
    monkeypatch.setattr(residents, "_REPAID", 1e-3)
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        before = kept(backend)
        _, seen, _ = run(pipe, device)
        assert [now for now, _ in seen] == [before] * 6
        run(pipe, device, steps=1)
        assert kept(backend) != before


def test_where_computation_is_the_limit_residents_stay(make, device, keys):
    """No others are looked for where copies cost no time."""
    sim.configure(h2d_gbps=100 * GBPS)
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        before = kept(backend)
        _, _, steps = run(pipe, device)
        assert kept(backend) == before
        assert steps == pytest.approx([sum(TIMES) / 1e3] * 5)


def test_other_times_choose_anew(make, device, keys):
    """A call in which blocks take much longer, or shorter, has residents of its own; one in which they take a little more has not."""
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        run(pipe, device)
        before = kept(backend)
        for block in pipe.transformer.blocks:
            block.seconds *= 1.1
        run(pipe, device)
        assert kept(backend) == before
        for block, seconds in zip(pipe.transformer.blocks, [0.6] * 3 + [0.009] * 6, strict=True):
            block.seconds = seconds
        _, seen, _ = run(pipe, device)
        assert seen[0][0] == before
        assert seen[-1][0] != before
        assert backend.report().peak_device_bytes <= keys["device_memory"]


def test_a_device_that_cannot_time_events(make, device, keys, monkeypatch):
    """The residents stay as they were chosen by their sizes, and the report says so."""

    def refuse(*_):
        raise NotImplementedError("no such event")

    monkeypatch.setattr(clock, "_timing_event", refuse)
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        before = kept(backend)
        run(pipe, device)
        assert kept(backend) == before
        assert counts(backend).costs == "assumed"


@pytest.mark.parametrize("kind", ["leading", "pageable", "everything streams", "nothing streams"])
def test_where_nothing_is_to_be_chosen_nothing_is_timed(make, device, keys, kind):
    """Leading residents, pageable masters, whose copies overlap with nothing, and what streams as a whole, or not at all."""
    pipe = make()
    given = {
        "leading": {**keys, "layer_options": {"dit": {"resident_placement": "leading"}}},
        "pageable": {**keys, "pin_memory": False},
        "everything streams": {},
        "nothing streams": {"device_memory": 2 * sum(SIZES)},
    }[kind]
    with pipe.enable_omni_offload("layer", device=device, **given) as backend, torch.no_grad():
        before = kept(backend)
        run(pipe, device)
        assert kept(backend) == before
        assert counts(backend).costs == "assumed"


def test_pageable_weights_keep_what_is_large():
    """Where copies do not overlap, the residents are those that leave least to copy."""
    found = ResidentChoice(3, overlaps=False).choose(SIZES, number=None, nbytes=budget(0.75), leading=False)
    streamed = [size for index, size in enumerate(SIZES) if index not in found]
    least = sum(SIZES)
    for number in range(10):
        for others in itertools.combinations(SIZES, number):
            rest = sum(SIZES) - sum(others)
            if rest + min(3, number) * max(others, default=0) <= budget(0.75):
                least = min(least, sum(others))
    assert sum(streamed) == least


def test_a_pass_that_failed_tells_nothing(make, device, keys):
    """What came before the error is forgotten; the passes after it decide."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        before = kept(backend)
        pipe.transformer.blocks[8].fails = True
        for _ in range(2):
            with pytest.raises(ValueError, match="told to"):
                pipe(torch.ones(8, device=device))
            assert not residency_of(backend).ring._times._copies
        pipe.transformer.blocks[8].fails = False
        out, seen, _ = run(pipe, device)
        assert torch.equal(out.cpu(), plain(torch.ones(8)))
        assert seen[0][0] == before
        assert seen[1][0] != before


def test_a_pass_without_some_blocks_tells_nothing(make, device, keys):
    """What a block takes that did not run is not known; nor is anything once three passes have told nothing."""
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        before = kept(backend)
        pipe.transformer.blocks[0](torch.ones(8, device=device))
        pipe.transformer.order = [1, 2, 3, 4, 5, 6, 7, 8]
        run(pipe, device)
        assert kept(backend) == before
        assert counts(backend).costs == "assumed"


@pytest.mark.parametrize("order", [[8, 7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 5]], ids=["reversed", "repeated"])
def test_the_order_is_known_too(make, device, keys, order):
    """Blocks that run in another order than they are declared in, or twice: from the second pass on none is missed, and all is right."""
    plain, pipe = make(), make()
    plain.transformer.order = pipe.transformer.order = order
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        missed = []
        pipe.on_step = lambda _, x: (missed.append(counts(backend).misses), x)[1]
        assert torch.equal(pipe(torch.ones(8, device=device)).cpu(), plain(torch.ones(8)))
        assert counts(backend).costs == "measured"
        assert len({*missed[2:]}) == 1
        assert missed[1] - missed[0] <= 1  # the rest, of which a part came


@pytest.mark.parametrize("step", ["forget_slots", "_regroup", "reselect"])
def test_an_interrupted_exchange_is_done_again(make, device, keys, step, monkeypatch):
    """Wherever the change of residents is cut short, the next call is right, within the budget."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        run(pipe, device)
        chosen = kept(backend)
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        residency = residency_of(backend)
        exchange = type(residency)._exchange

        def interrupted(*arguments):
            owner = residency if step == "_regroup" else residency.blocks[0]
            with monkeypatch.context() as patch:
                patch.setattr(type(owner), step, _interrupt)
                exchange(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(type(residency), "_exchange", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(pipe, device)
        for _ in range(2):
            out, *_ = run(pipe, device)
            assert torch.equal(out.cpu(), plain(torch.ones(8)))
        assert kept(backend) == chosen
        assert backend.report().peak_device_bytes <= keys["device_memory"]
    assert torch.equal(pipe.transformer(torch.ones(8)), plain.transformer(torch.ones(8)))


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_when_times_differ():
    """By a quarter of all computation, or of the speed of copies; not by less."""
    timed = TimedPass((0, 1), {0: 1.0, 1: 3.0}, 1e-9)
    assert not timed.differs(timed)
    assert not TimedPass((0, 1), {0: 1.5, 1: 3.0}, 1.3e-9).differs(timed)
    assert TimedPass((0, 1), {0: 2.0, 1: 3.5}, 1e-9).differs(timed)
    assert TimedPass((0, 1), {0: 1.0, 1: 3.0}, 1.5e-9).differs(timed)
    assert timed.differs(TimedPass((0, 1), {0: 1.0, 1: 3.0}, 1.5e-9))
