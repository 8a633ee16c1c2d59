"""What one rank does and the others do not, and blocks of odd kinds: right, or one error by name; nobody hangs, nothing is lost silently."""

import copy
import datetime as dt

import pytest
import torch
from rank_threads import GATHER, Ranks, leftovers, makes, same
from torch import nn

from omni_offload import OffloadStateError
from omni_offload.testing import sim


@pytest.fixture(scope="module")
def make(kit):
    """Make the pipeline; every rank makes its own, with equal weights."""
    return makes(kit)


@pytest.fixture
def ranks(device, monkeypatch):
    """Two ranks."""
    return Ranks(2, monkeypatch)


# ---- what was not alike before ---------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer beside an adapter."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(64, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def _swap(block):
    block.up.weight.data[[1, 2]] = block.up.weight.data[[2, 1]]


def _adapt(block):
    block.down = Adapted(block.down).requires_grad_(False)


UNLIKE = {
    "one value": (lambda block: block.up.weight.data[60].__setitem__(7, 99.0), r"blocks\.3\.up\.weight: torch\.float32"),
    "two rows in another order": (_swap, r"blocks\.3\.up\.weight: torch\.float32"),
    "the type of a weight": (lambda block: setattr(block.down.bias, "data", block.down.bias.int()), r"blocks\.3\.down\.bias: torch\.int32"),
    "an adapter": (_adapt, r"transformer   dit .* KiB"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_weights_that_differ_on_one_rank(make, ranks, what):
    """However small the difference, no rank enables, all name it, and each keeps what it has."""
    change, named = UNLIKE[what]

    def rank(index, device):
        pipe, plain = make(), make()
        for one in (pipe, plain) if index else ():
            change(one.transformer.blocks[3])
        with pytest.raises(OffloadStateError, match=f"the ranks do not do the same; here is '.*{named}"):
            pipe.enable_omni_offload("layer", device=device, **GATHER)
        assert leftovers(pipe) == []
        assert (index and what == "an adapter") or same(pipe, plain)

    ranks.all(rank)


@pytest.mark.parametrize("setting", [{"keep_between_calls": True}, {"host_memory": "24KiB"}, {"device_memory": "120KiB"}], ids=str)
def test_settings_that_differ_on_one_rank(make, ranks, setting):
    """What is configured otherwise is named with both values."""

    def rank(index, device):
        pipe = make()
        with pytest.raises(OffloadStateError, match=rf"here is 'config\.{next(iter(setting))}: \w+', and on rank {1 - index} 'config"):
            pipe.enable_omni_offload("layer", device=device, **GATHER, **(setting if index else {}))

    ranks.all(rank)


# ---- what one rank does while the offload is enabled ------------------------------------------------------------------------------

ALONE = {
    "state_dict": lambda pipe: pipe.transformer.state_dict(),
    "save_pretrained": lambda pipe: pipe.transformer.save_pretrained("nowhere"),
    "deepcopy": copy.deepcopy,
    "load_state_dict": lambda pipe: pipe.transformer.blocks[1].load_state_dict({}, strict=False),
}


def refuse(pipe):
    """Return a step that asks for what is refused."""

    def on_step(_, y):
        with pytest.raises(OffloadStateError, match="of whose blocks this rank holds a part only"):
            pipe.transformer.state_dict()
        return y

    return on_step


def test_what_is_refused_waits_for_nobody(make, ranks, x):
    """What would need the other ranks is refused on the one that asks; the ranks stay in step, also where it is asked from a call."""
    want = make()(x)

    def rank(index, device):
        pipe = make()
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            for refused in ALONE.values() if index else ():
                with pytest.raises(OffloadStateError, match="component 'transformer', of whose blocks this rank holds a part only"):
                    refused(pipe)
            if index:
                pipe.offload_backend.refresh()
                pipe.offload_backend.release()
                pipe.on_step = refuse(pipe)
            assert torch.equal(pipe(x).cpu(), want)
        assert same(pipe, make())

    ranks.all(rank)


def test_edits_of_what_is_whole(make, ranks, x):
    """Residents and the rest are edited on every rank while the offload is enabled, in place and by `.data`: in force once, and kept."""

    def rank(_, device):
        pipe, plain = make(), make()
        options = {"layer_options": {"dit": {"weight_transfer": "allgather", "resident_layers": 2}}}
        with pipe.enable_omni_offload("layer", device=device, **options):
            pipe(x)
            resident = [index for index, block in enumerate(pipe.transformer.blocks) if block.down.bias.numel()]
            assert len(resident) == 2
            for one in (pipe, plain):
                one.transformer.blocks[resident[0]].down.bias.add_(1)
                one.transformer.blocks[resident[1]].up.bias.data.mul_(2)
                one.transformer.embed.weight.data.mul_(1.5)
            assert all(torch.equal(pipe(x).cpu(), plain(x)) for _ in range(2))
        assert same(pipe, plain)
        assert torch.equal(pipe(x), plain(x))

    ranks.all(rank)


def _at(step, error):
    def on_step(index, y):
        if index == step:
            raise error
        return y

    return on_step


def _edit(pipe, x):
    pipe.transformer.blocks[3].up.bias.add_(1)
    pipe(x)


def _leave(pipe, x):
    pipe.on_step = _at(1, ValueError("told to"))
    pipe(x)


def _interrupt(pipe, x):
    pipe.on_step = _at(1, KeyboardInterrupt("told to"))
    pipe(x)


def _disable_within(pipe, x):
    pipe.on_step = lambda index, y: (pipe.disable_omni_offload(), y)[1] if index else y
    pipe(x)


def _another_step(pipe, x):
    pipe.steps += 1
    pipe(x)


#: What one rank does: the error that it gets, and what the other one, which calls the pipeline, is told of it.
APART = {
    "an edit": (
        _edit,
        OffloadStateError,
        r"weights of transformer\.blocks\.3 were written",
        r"rank 1: OffloadStateError: weights of transformer\.blocks\.3",
    ),
    "an exception in a step": (_leave, ValueError, "told to", "rank 1: ValueError: told to"),
    "an interrupt in a step": (_interrupt, KeyboardInterrupt, "told to", "rank 1: KeyboardInterrupt: told to"),
    "disable in a call": (
        _disable_within,
        OffloadStateError,
        "disable was asked for while",
        "rank 1: OffloadStateError: disable was asked",
    ),
    "a step more": (
        _another_step,
        OffloadStateError,
        "a gather of weights failed",
        "rank 1: OffloadStateError: a gather of weights failed",
    ),
    "disable": (
        lambda pipe, _: pipe.disable_omni_offload(),
        OffloadStateError,
        "hold no weights any more: load",
        "a gather of weights failed",
    ),
    "shutdown": (lambda pipe, _: pipe.offload_backend.shutdown(), None, "", "a gather of weights failed"),
}


OFTEN = ("an edit", "an exception in a step", "disable")


@pytest.mark.parametrize("what", [what if what in OFTEN else pytest.param(what, marks=pytest.mark.exhaustive) for what in APART])
def test_one_rank_does_something_else(make, ranks, x, what):
    """That rank gets its own error, the other one is told in the call that it makes, within the limit; then both give up, and say so."""
    act, error, own, told = APART[what]

    def rank(index, device):
        pipe = make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        if index and error is None:
            act(pipe, x)
        else:
            with pytest.raises(error if index else OffloadStateError, match=own if index else told) as info:
                act(pipe, x) if index else pipe(x)
            assert str(info.value).count("disable the offload, load the weights") <= 1, info
            del info  # its frames hold what is on the device
        if not (index and what in ("disable", "shutdown")):
            with pytest.raises(OffloadStateError, match="the blocks of transformer hold no weights any more: load these components again"):
                backend.disable()
        assert leftovers(pipe) == []
        with pytest.raises(
            OffloadStateError, match=r"these were lost.*: transformer\.blocks\..* and \d+ more; load their components again"
        ):
            pipe.enable_omni_offload("layer", device=device)
        pipe.transformer, pipe.on_step = make().transformer, lambda _, y: y
        with pipe.enable_omni_offload("layer", device=device):
            pipe(x)

    ranks.limit = dt.timedelta(seconds=2)
    ranks.all(rank)


# ---- blocks of odd kinds ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Weights of every kind, most of which are smaller than what a rank holds at least."""

    def __init__(self, seed, *, table):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        values = torch.randn(7, 5, generator=made)
        self.few = nn.Parameter(values[:3, :1].to(torch.bfloat16))
        self.eighth = nn.Parameter(values.to(torch.float8_e4m3fn), requires_grad=False)
        self.flags = nn.Parameter(values[0] > 0, requires_grad=False)
        self.turned = nn.Parameter((values * 50).to(torch.int8).t(), requires_grad=False)
        self.number = nn.Parameter(values[0, 0].double().clone())
        self.waves = nn.Parameter(torch.complex(values[0], values[1]))
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.shifted = nn.Parameter(torch.randn(9, generator=made)[1:4])  # within a word
        self.wide = nn.Parameter(torch.randn(11, 64, generator=made)[:, 3:40].detach())  # with gaps that are nobody's
        self.register_buffer("table", torch.randn(table, generator=made))

    def forward(self, x):
        x = x + self.few.float().sum() * self.eighth.float()[:, :1].mean() + self.flags.float().sum()
        x = x * self.turned.float().mean() + self.number.float() + self.waves.abs().sum() + self.nothing.sum() + self.shifted.sum()
        return torch.tanh(x + self.wide.sum() + self.table[:32])


class Small(nn.Module):
    """One value: less than a byte for each of three ranks."""

    def __init__(self):
        super().__init__()
        self.flag = nn.Parameter(torch.tensor([True]), requires_grad=False)

    def forward(self, x):
        return x + self.flag


class Empty(nn.Module):
    """No value at all."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return x + self.nothing.sum()


#: A buffer of more than 1 MiB travels with its block, a smaller one with the rest.
MORE = [(2, 100, 0, 40), (3, 4096, 2, (1 << 18) + 1), (2, 1 << 21, 0, (1 << 18) + 1)]


@pytest.mark.parametrize(
    ("size", "chunk_bytes", "residents", "table"),
    [(3, 1, 1, 40), (1, 100, 0, 40), (3, 1 << 20, 0, (1 << 18) + 1), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in MORE)],
)
def test_odd_blocks(make, device, monkeypatch, x, size, chunk_bytes, residents, table):
    """Two or three ranks, or one; types mixed, blocks of fewer bytes than ranks, none, gaps; chunks that do not divide: bit for bit."""
    sim.configure(devices=size)
    ranks = Ranks(size, monkeypatch)
    monkeypatch.setattr("omni_offload.DistributedLayerwiseOffloadBackend.chunk_bytes", chunk_bytes)

    def blocks():
        return Odd(1, table=table), Small(), Odd(2, table=table), Empty(), Small(), Odd(3, table=table)

    def odd():
        pipe = make()
        pipe.transformer.blocks = nn.ModuleList(blocks()).requires_grad_(False)
        pipe.transformer.order = list(range(6))
        pipe.transformer.eval()  # a table in training mode might be written unseen
        return pipe

    plain = odd()
    want = plain(x)

    def rank(_, device):
        pipe = odd()
        options = {"layer_options": {"dit": {"weight_transfer": "allgather", "resident_layers": residents}}}
        for _ in range(2):
            with pipe.enable_omni_offload("layer", device=device, **options):
                assert all(torch.equal(pipe(x).cpu(), want) for _ in range(2))
        assert same(pipe, plain)

    ranks.all(rank)
