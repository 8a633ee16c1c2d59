"""Blocks of which every rank keeps a part. Ranks are threads here, each with a device of its own; their groups are real ones (gloo)."""

import contextlib
import copy
import datetime as dt
import gc
import threading
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_threads import GATHER, Ranks, kept, leftovers, makes, ring, same
from torch import nn

from omni_offload import ModuleResidency, OffloadConfig, OffloadPlan, OmniDiffusionConfig, resolve_offload_plan
from omni_offload.accelerator import Accelerator
from omni_offload.backends import communicators, gathering
from omni_offload.backends.agreement import Agreement
from omni_offload.backends.communicators import World
from omni_offload.backends.gathering import Gathering
from omni_offload.backends.rotation import Rotation
from omni_offload.errors import OffloadConfigError, OffloadError, OffloadStateError
from omni_offload.residency import Counters, Partition, ResidencyContext
from omni_offload.residency.sharded_block import ShardedBlock
from omni_offload.testing import sim


@pytest.fixture(scope="module")
def make(kit):
    """Make the pipeline; every rank makes its own, with equal weights."""
    return makes(kit)


@pytest.fixture
def ranks(device, monkeypatch):
    """Two ranks."""
    return Ranks(2, monkeypatch)


SETTINGS = [
    {},
    {"slots": 2},
    {"pin_memory": False},
    {"host_memory": "24KiB"},
    {"keep_between_calls": True},
    {"device_memory": "120KiB"},
    {"layer_options": {"dit": {"weight_transfer": "allgather", "resident_layers": 2}}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_call(make, ranks, x, settings):
    """Every rank makes what a resident run makes, and ends with whole weights: the same objects, ties and strides, bit for bit."""
    plain = make()
    want = plain(x)

    def rank(_, device):
        pipe = make()
        before = [*pipe.transformer.parameters()]
        for _ in range(2):
            with pipe.enable_omni_offload("layer", device=device, **{**GATHER, **settings}) as backend:
                assert sum(p.numel() for p in pipe.transformer.blocks[4].parameters()) == 0 or len(ring(backend).blocks) < 5
                assert all(torch.equal(pipe(x).cpu(), want) for _ in range(2))
                assert all(torch.equal(pipe.transformer(x[:, :32]).cpu(), plain.transformer(x[:, :32])) for _ in range(2))
            assert all(p is q for p, q in zip(pipe.transformer.parameters(), before, strict=True))
            assert same(pipe, plain)
            assert leftovers(pipe) == []
        assert torch.equal(pipe(x), want)

    ranks.all(rank)


@pytest.mark.parametrize("residents", [0, 2])
def test_bytes(make, ranks, x, residents):
    """A rank's host keeps its part of what streams, and its device no more than slots, residents and rest."""
    options = {"layer_options": {"dit": {"weight_transfer": "allgather", "resident_layers": residents}}}

    def rank(index, device):
        pipe = make()
        with pipe.enable_omni_offload("layer", device=device, **options) as backend:
            residency = backend._rotation.members["transformer"].owner.residency
            whole = sum(block.host_bytes for block in residency.ring.blocks.values())
            assert len(residency.ring.blocks) == 5 - residents
            assert kept(backend) <= whole / 2 * 1.03
            sim.reset_peak()
            pipe(x)
            report = backend.report()
            assert report.peak_device_bytes <= max(residency.padded_bytes, *(c.use_bytes for c in report.components))
            assert report.pinned_host_bytes <= (kept(backend) + sum(c.weight_bytes for c in report.components) - whole) * 1.03
        return whole

    assert len({*ranks.all(rank)}) == 1


@pytest.mark.parametrize("mode", ["threads", "virtual"])
def test_any_order_that_is_the_same_everywhere(make, ranks, x, mode):
    """Blocks skipped, repeated and reversed, passes that fail on all ranks: right, and the ranks stay in step."""
    sim.configure(mode=mode)
    plain = make()
    orders = [[0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3], [], [0, 4, 3, 2, 1, 0], [2]]
    y = x[:, :32]
    want = []
    for order in orders:
        plain.transformer.order = order
        want.append(plain.transformer(y))

    def rank(_, device):
        pipe = make()
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            for order, expected in zip(orders, want, strict=True):
                pipe.transformer.order = order
                pipe.transformer.blocks[2].fail = KeyError("told to")
                with contextlib.suppress(KeyError):
                    pipe(x)
                pipe.transformer.blocks[2].fail = None
                assert torch.equal(pipe.transformer(y).cpu(), expected)
                pipe(x)
        assert same(pipe, plain)

    ranks.all(rank)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=1, max_size=5), st.sampled_from([2, 3]), st.sampled_from([0, 2]))
def test_random_schedules(make, ranks, passes, slots, residents):
    """Ranks that skip, repeat and reorder the same blocks make what a resident run makes, and stay in step."""
    options = {"dit": {"weight_transfer": "allgather", "resident_layers": residents}}
    plain, y = make(), torch.randn(2, 32, generator=torch.Generator().manual_seed(3))

    def outputs(pipe):
        made = []
        for order in passes:
            pipe.transformer.order = order
            made.append(pipe.transformer(y).cpu())
        return made

    want = outputs(plain)

    def rank(_, device):
        pipe = make()
        with pipe.enable_omni_offload("layer", device=device, slots=slots, layer_options=options):
            assert all(torch.equal(a, b) for a, b in zip(outputs(pipe), want, strict=True))
        assert same(pipe, plain)

    ranks.all(rank)


PASS = st.tuples(st.lists(st.integers(0, 4), max_size=6), st.booleans())


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.lists(PASS.map(lambda one: (one, one)), min_size=1, max_size=4), st.lists(st.tuples(PASS, PASS), min_size=1, max_size=3))
)
def test_random_calls(make, ranks, calls):
    """Calls with passes that are alike on all ranks, some left early by an exception, and others that are not: what returns is right.

    Ranks that gathered other blocks are told in the same call, by name; ranks that did not stay in step.
    """
    ranks.limit = dt.timedelta(seconds=3)
    y = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))

    def run(pipe, rank):
        """What each call returned; an error of one that was left early."""
        for passes in calls:
            pipe.transformer.order, stops = passes[rank]
            pipe.transformer.blocks[2].fail = KeyError("told to") if stops else None
            try:
                yield pipe(y).cpu()
            except (KeyError, OffloadStateError) as error:
                yield error

    def rank(index, device):
        pipe, plain, told = make(), make(), []
        pipe.enable_omni_offload("layer", device=device, **GATHER)
        for number, (made, want) in enumerate(zip(run(pipe, index), run(plain, index), strict=True)):
            if isinstance(made, OffloadStateError) or getattr(made, "__notes__", ()):
                told.append(number)
            elif isinstance(want, torch.Tensor):
                assert torch.equal(made, want)
            else:
                assert repr(made) == repr(want)
        if told:
            with pytest.raises(OffloadStateError, match="the blocks of transformer hold no weights any more"):
                pipe.disable_omni_offload()
        else:
            pipe.disable_omni_offload()
            assert same(pipe, plain)
        assert leftovers(pipe) == []
        return told

    told = ranks.all(rank)
    gc.collect()  # what errors held
    assert told[0] == told[1]
    assert not told[0] or any(one != other for one, other in calls)
    assert sim.races() == []


# ---- what may not be done with a part -------------------------------------------------------------------------------------------

REFUSED = {
    "state_dict": lambda t: t.state_dict(),
    "state_dict of a block": lambda t: t.blocks[1].down.state_dict(),
    "deepcopy": copy.deepcopy,
    "deepcopy of blocks": lambda t: copy.deepcopy(t.blocks),
    "save_pretrained": lambda t: t.save_pretrained("nowhere"),
    "load_state_dict": lambda t: t.load_state_dict({"blocks.1.down.weight": torch.zeros(32, 64)}, strict=False),
    "to": lambda t: t.to(torch.float64),
}


def test_a_part_is_not_copied(make, ranks, x):
    """state_dict, save_pretrained, deepcopy, loading and casts of a component of which a rank holds a part are refused by its name."""
    want = make()(x)

    def rank(_, device):
        pipe = make()
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            for refused in REFUSED.values():
                with pytest.raises(OffloadStateError, match="component 'transformer', of whose blocks this rank holds a part only"):
                    refused(pipe.transformer)
            copy.deepcopy(pipe.transformer.embed).load_state_dict(pipe.transformer.embed.state_dict())
            copy.deepcopy(pipe.vae).to(torch.float64)
            assert torch.equal(pipe(x).cpu(), want)
        copy.deepcopy(pipe.transformer).load_state_dict(pipe.transformer.state_dict())

    ranks.all(rank)


EDITS = {
    "in place": lambda t: t.blocks[3].up.bias.add_(1),
    "other memory": lambda t: setattr(t.blocks[3].up.bias, "data", torch.ones(64)),
    "another parameter": lambda t: setattr(t.blocks[3].up, "bias", nn.Parameter(torch.ones(64), requires_grad=False)),
    "one more": lambda t: setattr(t.blocks[3], "more", nn.Parameter(torch.ones(4), requires_grad=False)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_refused(make, ranks, x, edit):
    """What is done to weights of which a rank holds a part has no effect, so that the next use of the component is refused, by name."""

    def rank(_, device):
        pipe = make()
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            pipe(x)
            EDITS[edit](pipe.transformer)
            with pytest.raises(OffloadStateError, match=r"transformer\.blocks\.3 were .*change them on every rank alike"):
                pipe(x)

    ranks.all(rank)


def test_a_block_that_writes_its_weights_is_refused(make, ranks, x):
    """What a block writes would be in one rank's slot only."""
    want = make()(x)

    def rank(_, device):
        pipe = make()
        block = pipe.transformer.blocks[2]
        own = type(block).forward
        block.forward = lambda y: (own(block, y), block.up.bias.mul_(1.0))[0]
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            with pytest.raises(OffloadStateError, match=r"transformer\.blocks\.2 wrote its weights"):
                pipe(x)
            block.__dict__["forward"]._previous = lambda y: own(block, y)
            assert torch.equal(pipe(x).cpu(), want)

    ranks.all(rank)


def test_buffers_of_training_are_refused_while_they_may_be_written(make, ranks, x):
    """A module that goes into training mode may write its buffers in a way that nothing tells."""

    def rank(_, device):
        pipe = make()
        pipe.transformer.blocks[2].register_buffer("table", torch.zeros(1 << 19))
        pipe.eval = [m.eval() for m in (pipe.transformer,)]
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            pipe(x)
            pipe.transformer.blocks[2].train()
            with pytest.raises(OffloadStateError, match=r"transformer\.blocks\.2 wrote its weights or buffers"):
                pipe(x)

    ranks.all(rank)


@pytest.mark.parametrize("kind", ["inference tensors", "buffers of training"])
def test_what_may_be_written_unseen_is_refused(make, ranks, x, kind):
    """Tensors of which nothing would tell that a block wrote them are refused when offload is enabled, by name, with nothing touched."""

    def rank(_, device):
        pipe, plain = make(), make()
        block = pipe.transformer.blocks[2]
        if kind == "inference tensors":
            with torch.inference_mode():
                block.up.bias = nn.Parameter(block.up.bias.clone(), requires_grad=False)
        else:
            block.register_buffer("table", torch.zeros(1 << 19))
            block.train()
        name = "up.bias" if kind == "inference tensors" else "table"
        with pytest.raises(OffloadStateError, match=rf"transformer\.blocks\.2 is to be gathered.*{name} cannot be told.*'rank-local'"):
            pipe.enable_omni_offload("layer", device=device, **GATHER)
        assert leftovers(pipe) == []
        assert torch.equal(pipe(x), plain(x))

    ranks.all(rank)


def test_a_replaced_component_is_refused(make, ranks, x):
    """Another module in the place of one of which a rank holds a part, or one that comes late, is refused by name."""

    class Late(make.cls):
        _dit_modules = ["transformer", "late"]
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",), "late": ("blocks",)})
        late = None

    def rank(_, device):
        pipe = make(cls=Late)
        first = pipe.transformer
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            pipe.transformer = make().transformer
            with pytest.raises(OffloadStateError, match="component 'transformer' was replaced"):
                pipe(x)
            pipe.transformer = first
            pipe(x)
            pipe.late = make().transformer
            with pytest.raises(OffloadStateError, match="component 'late' was put there while offload is enabled"):
                pipe(x)
            pipe.late = None
            pipe(x)
        assert torch.equal(pipe(x), make()(x))

    ranks.all(rank)


def test_the_rest_may_change(make, ranks, x):
    """What is not in blocks is whole: it is edited and replaced as ever; and what is told to be stale is gathered again."""
    plain = make()
    plain.transformer.embed.bias.data = torch.ones(32)
    want = plain(x)

    def rank(_, device):
        pipe = make()
        options = {"dit": {"weight_transfer": "allgather", "resident_layers": 0}}
        settings = {"keep_between_calls": True, "device_memory": "1MiB", "layer_options": options}
        with pipe.enable_omni_offload("layer", device=device, **settings) as backend:
            pipe(x)
            pipe.transformer.embed.bias = nn.Parameter(torch.zeros(32), requires_grad=False)
            pipe.transformer.embed.bias.add_(1)
            assert torch.equal(pipe(x).cpu(), want)
            backend.refresh()
            assert torch.equal(pipe(x).cpu(), want)
        assert torch.equal(pipe(x), want)

    ranks.all(rank)


def test_weights_are_not_written_from_outside(make, ranks):
    """Adapters are fused into whole weights only."""

    def rank(_, device):
        pipe = make()
        with pipe.enable_omni_offload("layer", device=device, **GATHER) as backend:
            with pytest.raises(OffloadStateError, match="'transformer' were to be written"), backend.writing("transformer"):
                raise AssertionError("not reached")
            with backend.writing("vae"):
                pipe.vae.dec.bias.add_(1)

    ranks.all(rank)


# ---- enabling together ----------------------------------------------------------------------------------------------------------


def _failing(pipe, step):
    """Let a step of enabling fail on this rank: a plan, a claim, a preparation, a hook."""
    transformer = pipe.transformer
    if step == "plan":
        pipe._offload_plan = OffloadPlan(block_attrs={"transformer": ("nothing",)})
    elif step == "meta":
        transformer.embed.to("meta")
    elif step == "claim":
        pipe.other = ModuleResidency(transformer.blocks[3], "sim")
        pipe.other.prepare()
    else:
        with torch.inference_mode():
            transformer.blocks[4].up.bias = nn.Parameter(torch.ones(64), requires_grad=False)


def _memory(pipe):
    return [p.data_ptr() for p in pipe.transformer.blocks[2:].parameters()]


@pytest.mark.parametrize("step", ["plan", "meta", "claim", "prepare", "values", "slots"])
@pytest.mark.parametrize("bad", [0, 1])
def test_all_fail_together(make, ranks, x, step, bad):
    """A rank that cannot prepare, or prepares something else, makes all fail, each with what is wrong; nothing is left anywhere."""
    want = make()(x)
    ranks.limit = dt.timedelta(seconds=10)

    def rank(index, device):
        pipe, settings = make(), {**GATHER}
        if index == bad:
            if step == "values":
                pipe.transformer.blocks[3].down.bias.data[:] += 1
            elif step == "slots":
                settings["slots"] = 4
            else:
                _failing(pipe, step)
        memory = _memory(pipe)
        try:
            pipe.enable_omni_offload("layer", device=device, **settings)
        except OffloadError as error:
            assert pipe.offload_backend is None
            assert leftovers(pipe) == []
            assert _memory(pipe) == memory
            if index != bad:
                assert torch.equal(pipe(x), want)
            return str(error)
        raise AssertionError("enabled")

    told = ranks.all(rank)
    if step in ("values", "slots"):
        assert all("do not do the same" in one for one in told), told
        assert all({"values": "blocks.3.down.bias", "slots": "config.slots: "}[step] in one for one in told), told
    else:
        assert f"failed on rank {bad} (" in told[1 - bad], told
        assert told[bad].splitlines()[0][:60] in told[1 - bad], told


def test_ranks_may_fail_alike(make, ranks):
    """Where all ranks fail, each raises its own error, and is told of the others."""

    def rank(index, device):
        pipe = make()
        _failing(pipe, "claim")
        with pytest.raises(OffloadStateError, match="another offload owner") as info:
            pipe.enable_omni_offload("layer", device=device, **GATHER)
        return info.value.__notes__

    assert all(f"rank {1 - index} failed too" in notes[0] for index, notes in enumerate(ranks.all(rank)))


@pytest.mark.parametrize("comes", [0, 1])
def test_a_rank_that_does_not_come(make, ranks, x, comes):
    """A rank waits for the others as long as the limit says, and then says who did not come. When all come, nothing of that is left."""
    pipes, want = [make(), make()], make()(x)

    def alone(index, device):
        if index == comes:
            found = ["there is nothing of rank 1", "rank 0 has called nobody"][comes]
            with pytest.raises(OffloadStateError, match=rf"the ranks 0, 1 came to enable offload within 0\.3 s: TimeoutError: {found}"):
                pipes[index].enable_omni_offload("layer", device=device, **GATHER)
            assert leftovers(pipes[index]) == []

    def together(index, device):
        with pipes[index].enable_omni_offload("layer", device=device, **GATHER):
            assert torch.equal(pipes[index](x).cpu(), want)

    ranks.limit = dt.timedelta(seconds=0.3)
    ranks.all(alone)
    ranks.limit = dt.timedelta(seconds=20)
    ranks.all(together)


def test_a_rank_that_goes_while_the_others_connect(make, ranks, x, monkeypatch):
    """Addresses that a rank left behind are of no use to anyone: the next attempt has other ones."""
    pipes, want = [make(), make()], make()(x)
    whole = communicators.gloo_group

    def gone(index, device):
        patch.setattr(communicators, "gloo_group", lambda *args, **keys: _interrupt() if args[1] else whole(*args, **keys))
        with pytest.raises(KeyboardInterrupt if index else OffloadStateError, match=None if index else "came to enable offload within"):
            pipes[index].enable_omni_offload("layer", device=device, **GATHER)

    def together(index, device):
        with pipes[index].enable_omni_offload("layer", device=device, **GATHER):
            assert torch.equal(pipes[index](x).cpu(), want)

    ranks.limit = dt.timedelta(seconds=1)
    with monkeypatch.context() as patch:
        ranks.all(gone)
    ranks.limit = dt.timedelta(seconds=20)
    ranks.all(together)


def test_communicators_that_torch_names_otherwise(ranks, device, monkeypatch):
    """Torch names a communicator by how many a process has: where that differs between ranks they are told, and wait for nobody."""

    def other(_, **__):
        rank = ranks._local.rank
        group = communicators.gloo_group(dist.PrefixStore("of torch", store), rank, 2, ranks.limit, limit=ranks.limit)
        group._set_group_name(f"the {rank}th")
        return group

    store = dist.HashStore()
    monkeypatch.setattr(communicators, "open_group", other)
    monkeypatch.setattr(gathering, "backend_of_group", lambda *_: "nccl")
    ranks.worlds = [World(rank, store, lambda _: "nccl") for rank in range(2)]

    def rank(index, device):
        with pytest.raises(OffloadStateError, match=r"open a communicator: the ranks do not do the same; here is \"torch's name of it"):
            Gathering.open((0, 1), Accelerator.of(device), chunk_bytes=64, limit=ranks.limit)

    ranks.all(rank)


def test_communicators_that_one_rank_has_still(make, ranks, x):
    """A disable that was cut short on one rank leaves communicators to the other one only: both take new ones, and have the old ones' ranks."""
    pipes, want = [make(), make()], make()(x)

    def cut(index, device):
        backend = pipes[index].enable_omni_offload("layer", device=device, **GATHER)
        if index == 0:
            backend._gathering.close = _interrupt
            with pytest.raises(KeyboardInterrupt):
                backend.disable()
            backend._gathering = None
        pipes[index].disable_omni_offload()

    def again(index, device):
        with pipes[index].enable_omni_offload("layer", device=device, **GATHER):
            assert torch.equal(pipes[index](x).cpu(), want)

    ranks.all(cut)
    ranks.all(again)


# ---- out of step ----------------------------------------------------------------------------------------------------------------


def _ends(pipe, error):
    """Check that a backend whose ranks came out of step says so, and gives up cleanly."""
    with pytest.raises(OffloadStateError, match=error):
        pipe(torch.zeros(2, 64))
    with pytest.raises(OffloadStateError, match=r"transformer\.blocks\.0 cannot be gathered"):
        pipe.transformer(torch.zeros(2, 32))
    with pytest.raises(OffloadStateError, match=r"the blocks of transformer hold no weights any more: load these components again"):
        pipe.disable_omni_offload()
    assert pipe.offload_backend is None
    assert leftovers(pipe) == []
    pipe.disable_omni_offload()
    assert [p.device.type for p in pipe.transformer.parameters()] == ["cpu"] * len([*pipe.transformer.parameters()])


def test_other_blocks_on_other_ranks(make, ranks, x):
    """Ranks that skip other blocks get no output: at the end of the call each is told, and the backend is of no use any more."""
    ranks.limit = dt.timedelta(seconds=6)

    def rank(index, device):
        pipe = make()
        pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        pipe.transformer.order = [0, 1, 2, 3, 4] if index else [0, 2, 1, 3, 4]
        with pytest.raises(OffloadStateError, match=r"gathered other blocks, or in another order|a gather of weights failed"):
            pipe(x)
        _ends(pipe, "cannot be used: ")

    ranks.all(rank)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_call_that_fails_on_one_rank(make, ranks, x, bad):
    """The other ranks end within the limit, with the error of that one; then none is of use any more."""
    ranks.limit = dt.timedelta(seconds=6)

    def rank(index, device):
        pipe = make()
        pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        if index == bad:
            pipe.transformer.blocks[3].fail = KeyError("told to")
            with pytest.raises(KeyError, match="told to") as info:
                pipe(x)
            assert "the ranks have gathered other blocks" in info.value.__notes__[0]
        else:
            with pytest.raises(OffloadStateError, match=f"rank {bad}: KeyError: 'told to'"):
                pipe(x)
        _ends(pipe, "cannot be used: ")

    ranks.all(rank)


def test_a_rank_that_does_not_disable(make, ranks, x):
    """Whole weights need all ranks: the one that disables alone says which components are lost, within the limit."""
    ranks.limit = dt.timedelta(seconds=2)
    done = threading.Event()

    def rank(index, device):
        pipe = make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        if index == 0:
            with pytest.raises(OffloadStateError, match=r"came to 'disable' within 2 s.*the blocks of transformer hold no weights"):
                backend.disable()
            done.set()
        else:
            assert done.wait(30)
            backend.shutdown()
        assert leftovers(pipe) == []

    ranks.all(rank)


def test_shutdown(make, ranks, x):
    """At the process's end nothing is gathered any more, nothing raised, and the device is free; enabling again is an error."""

    def rank(_, device):
        pipe = make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        backend.shutdown()
        backend.shutdown()
        assert leftovers(pipe) == []
        assert pipe.transformer.blocks[3].down.bias.numel() == 0
        with pytest.raises(OffloadStateError, match="was shut down"):
            backend.enable(pipe)

    ranks.all(rank)


def test_an_interrupted_gather(make, ranks, x, monkeypatch):
    """An interrupt in a gather passes as it is; the ranks are out of step then, and all are told."""
    ranks.limit = dt.timedelta(seconds=6)

    def rank(index, device):
        pipe = make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        if index == 0:
            monkeypatch.setattr(backend._gathering._accelerator, "gather", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                pipe(x)
            monkeypatch.undo()
        else:
            with pytest.raises(OffloadStateError, match="rank 0: KeyboardInterrupt"):
                pipe(x)
        _ends(pipe, "cannot be used: ")

    ranks.all(rank)


@pytest.mark.parametrize("second", [ValueError, KeyboardInterrupt])
def test_what_fails_after_a_gather_that_failed(make, ranks, x, second):
    """What else fails while the gathers are ended is noted on the error; an interrupt passes as it is."""
    ranks.limit = dt.timedelta(seconds=3)

    def rank(index, device):
        pipe = make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        own = backend._gathering._accelerator
        if index == 0:
            backend._gathering._accelerator = types.SimpleNamespace(
                gather=_raising(KeyError("told to")), block=_raising(second("no device"))
            )
        with pytest.raises(second if (index, second) == (0, KeyboardInterrupt) else OffloadStateError) as info:
            pipe(x)
        if index == 0:
            assert f"ending the gathers failed too: {second.__name__}('no device')" in _notes(info.value)
        backend._gathering._accelerator = own
        _ends(pipe, "cannot be used: ")

    ranks.all(rank)


def test_out_of_memory_passes(make, ranks, x):
    """A device that runs out of memory while a block is gathered is no error of ours; the ranks are out of step all the same."""
    ranks.limit = dt.timedelta(seconds=3)

    def rank(index, device):
        pipe = make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        if index == 0:
            own = backend._gathering._accelerator
            fails = _raising(torch.OutOfMemoryError("told to"))
            backend._gathering._accelerator = types.SimpleNamespace(gather=fails, block=own.block)
            with pytest.raises(torch.OutOfMemoryError, match="told to"):
                pipe(x)
            backend._gathering._accelerator = own
        else:
            with pytest.raises(OffloadStateError, match="rank 0: OutOfMemoryError: told to"):
                pipe(x)
        _ends(pipe, "cannot be used: ")

    ranks.all(rank)


def _notes(error):
    """What is noted on an error and on those that led to it."""
    return [] if error is None else [*getattr(error, "__notes__", ()), *_notes(error.__cause__ or error.__context__)]


def _raising(error):
    def work(*_, **__):
        raise error

    return work


def test_an_interrupted_wait_at_the_end_of_a_call(make, ranks, x):
    """Who was interrupted while it heard the others does not know what they did, and gathers nothing with them from then on."""
    ranks.limit = dt.timedelta(seconds=3)

    def rank(index, device):
        pipe = make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        if index == 0:
            backend._gathering.agreement._exchange = _interrupt
            with pytest.raises(KeyboardInterrupt):
                pipe(x)
            _ends(pipe, "what the ranks say at the end of a call was not heard, for an interrupt")
        else:
            with pytest.raises(OffloadStateError, match="came to 'the end of a call' within 3 s"):
                pipe(x)
            _ends(pipe, "cannot be used: ")

    ranks.all(rank)


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_disable_that_is_cut_short(make, ranks, x, monkeypatch):
    """Whole weights that a rank does not get are said to be lost by the next disable; the others have theirs."""
    ranks.limit = dt.timedelta(seconds=6)

    def rank(index, device):
        pipe, plain = make(), make()
        backend = pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe(x)
        if index == 0:
            residency = backend._rotation.members["transformer"].owner.residency
            shard = next(held for block, held in residency.shards if block.index == 4)
            own = shard.make_whole
            shard.make_whole = lambda: (own(), _interrupt())
            with pytest.raises(KeyboardInterrupt):
                backend.disable()
            with pytest.raises(OffloadStateError, match=r"a gather of weights failed.*the blocks of transformer hold no weights"):
                backend.disable()
        else:
            backend.disable()
            assert same(pipe, plain)
        assert leftovers(pipe) == []

    ranks.all(rank)


def test_a_rank_that_fails_after_the_last_vote(make, ranks, x, monkeypatch):
    """Where whole weights are given up already, none are gathered by a rank alone: the error says which are lost; others hear of it."""
    ranks.limit = dt.timedelta(seconds=6)
    commit = ShardedBlock.commit

    def fail(block):
        if ranks._local.rank == 0 and block.index == 3:
            raise KeyError("told to")
        commit(block)

    monkeypatch.setattr(ShardedBlock, "commit", fail)

    def rank(index, device):
        pipe = make()
        if index == 0:
            with pytest.raises(KeyError, match="told to") as info:
                pipe.enable_omni_offload("layer", device=device, **GATHER)
            assert any("hold no weights any more: load their components again" in note for note in info.value.__notes__)
        else:
            pipe.enable_omni_offload("layer", device=device, **GATHER)
            with pytest.raises(OffloadStateError, match="rank 0: KeyError: 'told to'"):
                pipe(x)
            _ends(pipe, "cannot be used: ")
        assert leftovers(pipe) == []

    ranks.all(rank)


def test_a_failure_that_cannot_be_rolled_back_at_once(make, ranks, monkeypatch):
    """What a failed roll-back leaves is put right by disable, without the other ranks."""
    ranks.limit = dt.timedelta(seconds=6)
    failing = iter([True])
    whole = Rotation.give_up

    def give_up(self, **keys):
        return RuntimeError("told to") if next(failing, False) else whole(self, **keys)

    def rank(index, device):
        pipe, plain = make(), make()
        if index == 0:
            pipe.transformer.blocks[3].down.bias.data[:] += 1
            plain.transformer.blocks[3].down.bias.data[:] += 1
        with pytest.raises(OffloadStateError, match="do not do the same") as info:
            pipe.enable_omni_offload("layer", device=device, **GATHER)
        pipe.disable_omni_offload()
        assert same(pipe, plain)
        assert leftovers(pipe) == []
        return getattr(info.value, "__notes__", [])

    monkeypatch.setattr(Rotation, "give_up", give_up)
    assert any("rolling back failed too" in note for notes in ranks.all(rank) for note in notes)


# ---- several components ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_pair(kit):
    """Make a pipeline of two DiTs that alternate, and a text encoder with blocks that stream from each rank's own memory."""

    class Pair(kit.Pair):
        _offload_plan = OffloadPlan(
            block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)}, encoder_block_attrs={"text_encoder": ("layers",)}
        )

        def __init__(self, seed=0):
            super().__init__(seed)
            self.text_encoder.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).requires_grad_(False)
            self.text_encoder.forward = self._encode

        def _encode(self, x):
            for layer in self.text_encoder.layers:
                x = layer(x)
            return x

    lock = threading.Lock()

    def make(*args, **kwargs):
        with lock:
            return Pair(*args, **kwargs)

    return make


def test_two_models_and_an_encoder(make_pair, ranks, x):
    """Models that take turns with one set of slots are gathered in turn; an encoder beside them streams from its rank alone."""
    want = make_pair()(x)

    def rank(_, device):
        pipe = make_pair()
        with pipe.enable_omni_offload("layer", device=device, **GATHER) as backend:
            assert [member.name for member, _ in backend._rotation.gathered] == ["transformer", "transformer_2"]
            with backend.record() as recording:
                assert torch.equal(pipe(x).cpu(), want)
            backend.refresh()
            assert torch.equal(pipe(x).cpu(), want)
            backend.release()
            assert torch.equal(pipe(x).cpu(), want)
            inner = pipe.transformer.blocks[1]
            inner.register_forward_pre_hook(lambda *_: (pipe.transformer_2(x[:1]), None)[1])
            assert torch.equal(pipe(x).cpu(), want)
        assert not hasattr(pipe.transformer, "save_pretrained")
        return any(span.name.startswith("transformer_2") for span in recording.spans)

    assert ranks.all(rank) == [True, True]


def test_a_component_of_two_pipelines(make, ranks, x):
    """A component of whose blocks a rank holds a part is nobody else's; one that streams for another pipeline is not gathered."""

    def rank(_, device):
        first, second = make(), make(seed=1)
        second.transformer = first.transformer
        with first.enable_omni_offload("layer", device=device, **GATHER):
            with pytest.raises(OffloadStateError, match="of whose blocks this rank holds a part only"):
                second.enable_omni_offload("layer", device=device)
            first(x)
        with first.enable_omni_offload("layer", device=device):
            with pytest.raises(OffloadStateError, match="'transformer' streams for another pipeline"):
                second.enable_omni_offload("layer", device=device, **GATHER)
            first(x)

    ranks.all(rank)


def test_memory_that_another_component_has_too(make, ranks, x):
    """What another component has too stays with the rest: a gathered block gives its memory up. A plan that is older is refused."""

    def rank(_, device):
        pipe, plain = make(), make()
        config = OffloadConfig.from_od_config(OmniDiffusionConfig(diffusion_offload_config={"mode": "layer", **GATHER}))
        older = resolve_offload_plan(pipe, config)
        for one in (pipe, plain):
            flat = torch.ones(64 * 3)
            one.transformer.blocks[2].up.bias.data = flat[32:96]
            one.text_encoder.proj.bias.data = flat[:64]
        with pytest.raises(OffloadConfigError, match=r"blocks\.2\.up\.bias.* share memory.*rest_submodules"):
            pipe.enable_omni_offload(older, device=device)
        assert leftovers(pipe) == []
        with pipe.enable_omni_offload("layer", device=device, **GATHER):
            assert pipe.transformer.blocks[2].up.bias.numel() == 64
            assert torch.equal(pipe(x).cpu(), plain(x))
        assert same(pipe, plain)

    ranks.all(rank)


def test_a_cache_that_skips_blocks(make, ranks):
    """A cache that decides by what a rank computes would skip other blocks on other ranks."""

    class Hooks:
        hooks = {"fbc_block_hook": None, "layer_skip_hook": None}

    def rank(_, device):
        pipe = make()
        pipe.transformer.blocks[2]._diffusers_hook = Hooks()
        with pytest.raises(OffloadConfigError, match=r"'transformer' has a cache that skips blocks.*\(fbc_block_hook\)"):
            pipe.enable_omni_offload("layer", device=device, **GATHER)

    ranks.all(rank)


def test_a_pipeline_that_is_dropped(make, ranks):
    """Who takes over a component of a pipeline that was dropped while a rank held a part of it is told, and does not wait for anyone."""

    def rank(_, device):
        first, second = make(), make(seed=1)
        first.enable_omni_offload("layer", device=device, **GATHER)
        second.transformer = first.transformer
        del first
        gc.collect()
        with pytest.raises(OffloadStateError, match="dropped without being disabled, and the blocks of transformer hold no weights"):
            second.enable_omni_offload("layer", device=device)
        assert leftovers(second) == []

    ranks.all(rank)


# ---- the parts, one by one ------------------------------------------------------------------------------------------------------


def test_steps_that_differ(ranks):
    """Ranks at different steps, or a step after one that failed, are told so."""
    ranks.limit = dt.timedelta(seconds=2)

    def rank(index, device):
        groups = [ranks.worlds[index].take((0, 1), device, limit=ranks.limit) for _ in range(2)]
        one, two = (Agreement(group.host, (0, 1), ranks.limit) for group in groups)
        assert [message.fact for message in one.compare("here", str(index))] == ["0", "1"]
        with pytest.raises(OffloadStateError, match=rf"this rank is at 'step {index}', and rank {1 - index} is at 'step {1 - index}'"):
            one.agree(f"step {index}")
        with pytest.raises(OffloadStateError, match="a step failed before"):
            one.compare("here", "")
        if index == 0:
            error = KeyError("told to")
            two.tell("alone", error)
            assert "the other ranks could not be told: not all of the ranks 0, 1 came to 'alone'" in error.__notes__[0]

    ranks.all(rank)


def test_a_block_before_and_after(make, ranks, device):
    """A block of which no part is held yet cannot be gathered, and has nothing to renew; restoring it is nothing."""
    kept = types.SimpleNamespace(rank=0, size=2, chunk_bytes=64, lose=lambda _: False)
    pipe = make()
    blocks = [(f"blocks.{index}", block) for index, block in enumerate(pipe.transformer.blocks)]
    context = ResidencyContext(Accelerator.of(device))
    block = ShardedBlock(Partition(pipe.transformer, blocks), 3, context, Counters(), kept)
    with pytest.raises(RuntimeError, match=r"blocks\.3 is whole"):
        block.fetch_into(context.slots.make_extra(1 << 16))
    assert not block.strayed()
    block.restore()
    block.prepare(keep_origin=True)
    block.prepare()
    assert (block.pinned_bytes, block.master_bytes) == (0, block.padded_bytes // 2)
    block.restore(to_origin=True)
    assert torch.equal(pipe.transformer.blocks[3].up.weight, make().transformer.blocks[3].up.weight)


def test_communicators_are_used_again(device):
    """The next backend of the same ranks takes the communicators of the last, unless its ranks came out of step, or the world is another."""
    limit, accelerator = dt.timedelta(seconds=5), Accelerator.of(device)
    made = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            one, two = (Gathering.open((0,), accelerator, chunk_bytes=64, limit=limit) for _ in range(2))
            assert one._host is not two._host
            two.close()
            one.end("told to", failed=True)
            one.close()
            three = Gathering.open((0,), accelerator, chunk_bytes=64, limit=limit)
            assert three._host is two._host
            assert Gathering.open((0,), accelerator, chunk_bytes=64, limit=limit)._host not in (one._host, two._host)
            made.append(three)
        finally:
            dist.destroy_process_group()
    assert made[0]._host is not made[1]._host
    with pytest.raises(OffloadStateError, match=r"torch\.distributed is not initialised"):
        Gathering.open((0,), accelerator, chunk_bytes=64, limit=limit)


def test_a_backend_of_the_device_keeps_the_host_free(ranks, device, monkeypatch):
    """Where gathers are the device's, ranks are compared at the end of a call; the host waits for none before."""
    monkeypatch.setattr(gathering, "backend_of_group", lambda *_: "nccl")

    def rank(index, device):
        if index == 0:
            limit = dt.timedelta(seconds=20)
            one = Gathering.open((0, 1), Accelerator.of(device), chunk_bytes=64, limit=limit)
            one.gather_block("a block", lambda: None)
        else:
            Gathering.open((0, 1), Accelerator.of(device), chunk_bytes=64, limit=dt.timedelta(seconds=20))

    ranks.all(rank)
