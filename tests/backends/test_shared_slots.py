"""All rings of a pipeline take turns with one set of slots."""

import contextlib

import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.residency import Slot
from omni_offload.testing import sim


class Stack(nn.Module):
    def __init__(self, depth=4, width=16):
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16)) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.fixture(scope="session")
def make(kit):
    """Make a pipeline of an encoder with small blocks and two DiTs, all of which stream; the DiTs alternate."""

    class Three(kit.Pair):
        _offload_entry_points = {"vae": ("decode",)}
        _offload_plan = OffloadPlan(
            block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)},
            encoder_block_attrs={"text_encoder": ("blocks",)},
        )

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.text_encoder = Stack(3, width=4).requires_grad_(False)
            self.transformer = Stack(width=32).requires_grad_(False)
            self.transformer_2 = Stack(width=32).requires_grad_(False)
            self.steps = 3

        def __call__(self, x):
            x = self.text_encoder(x)
            for step in range(self.steps):
                x = self.on_step(step, self.transformer_2(self.transformer(x)))
            return self.vae.decode(torch.cat([x] * 4, dim=1))

    return Three


@pytest.fixture
def x():
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def made(monkeypatch, device):
    """The sizes of the slots that are made."""
    sim.configure(mode="virtual")
    sizes, own = [], Slot.__init__
    monkeypatch.setattr(
        Slot, "__init__", lambda slot, accelerator, nbytes, meter: (sizes.append(nbytes), own(slot, accelerator, nbytes, meter))[1]
    )
    return sizes


def _residency(backend, name):
    return backend._rotation.members[name].owner.residency


def test_switching_takes_no_memory(make, device, x, made):
    """Two models that alternate have one set of slots for a whole call, as large as the largest block; with the call it goes."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device, components=["dit", "vae"]) as backend, torch.no_grad():
        for _ in range(2):
            made.clear()
            assert torch.equal(pipe(x).cpu(), plain(x))
            assert made == [_residency(backend, "transformer").slot_bytes] * 3
            assert len(_residency(backend, "transformer").pool) == 0


def test_slots_grow_with_the_blocks(make, device, x, made):
    """A model with larger blocks than the one before makes larger slots, which all use from then on."""
    plain, pipe = make(), make()
    plain.on_step = lambda _, y: plain.text_encoder(y)
    pipe.on_step = lambda _, y: pipe.text_encoder(y)
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert made == [_residency(backend, "text_encoder").slot_bytes] * 3 + [_residency(backend, "transformer").slot_bytes] * 3


def test_a_budget_counts_them_once(make, kit, device, x):
    """What the rests of all models and one set of slots take is enough for all rests to stay for the call.

    The encoder's blocks, which waited in slots that were too small for the next model, are fetched anew.
    """
    plain, pipe = make(), make()
    for one in (plain, pipe):
        one.on_step = lambda _, y, one=one: one.text_encoder(y)
    with pipe.enable_omni_offload("layer", device=device) as backend:
        slots = _residency(backend, "transformer").pool_bytes
        rests = sum(_residency(backend, name).own_padded_bytes for name in ("text_encoder", "transformer", "transformer_2"))
    budget = max(rests + slots, kit.padded(pipe.vae))
    keys = {"device_memory": budget, "layer_options": {"dit": {"resident_layers": 0}, "text_encoder": {"resident_layers": 0}}}
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        report = backend.report()
        assert report.peak_device_bytes <= budget
        assert {part.name: part.loads for part in report.components if part.name.startswith("transformer")} == {
            "transformer": 1,
            "transformer_2": 1,
        }


def test_large_slots_make_room_under_a_budget(make, device, x, made):
    """Slots of another model that are too large for the budget beside a component are made anew, as small as its own blocks need."""
    plain, pipe = make(), make()
    for one in (plain, pipe):
        one.text_encoder.large = nn.Linear(64, 128).requires_grad_(False)
        one.on_step = lambda _, y, one=one: one.text_encoder(y)
    with pipe.enable_omni_offload("layer", device=device) as backend:
        budget = max(_residency(backend, name).padded_bytes for name in ("text_encoder", "transformer", "transformer_2"))
        assert _residency(backend, "text_encoder").own_padded_bytes + _residency(backend, "transformer").pool_bytes > budget
    made.clear()
    keys = {"device_memory": budget, "layer_options": {"dit": {"resident_layers": 0}, "text_encoder": {"resident_layers": 0}}}
    with pipe.enable_omni_offload("layer", device=device, **keys) as backend, torch.no_grad():
        assert torch.equal(pipe(x).cpu(), plain(x))
        assert backend.report().peak_device_bytes <= budget
        assert len(made) > 6


@pytest.mark.parametrize("slots", [2, 3])
def test_a_model_within_a_block_of_another(make, device, x, slots):
    """A model that a block of another one calls takes the slots of blocks that do not run, and both are right."""
    plain, pipe = make(), make()
    for one in (plain, pipe):
        block, own = one.transformer.blocks[1], type(one.transformer.blocks[1]).forward
        block.forward = lambda y, one=one, block=block, own=own: own(block, y) + one.transformer_2(y)
    with pipe.enable_omni_offload("layer", device=device, slots=slots), torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), plain(x))


def test_models_within_one_another_too_deep_for_a_budget(make, device, x):
    """Where every slot holds a block that runs, the error names those of all models."""
    pipe = make()
    inner = pipe.transformer_2.blocks
    inner[0].forward = inner[1].__call__
    inner[1].forward = inner[2].__call__
    block = pipe.transformer.blocks[1]
    block.forward = pipe.transformer_2.__call__
    named = pytest.raises(OffloadStateError, match=r"transformer_2\.blocks\.1 was called within .*transformer\.blocks\.1, and all 2 slots")
    keys = {"slots": 2, "device_memory": "1MiB", "layer_options": {"dit": {"resident_layers": 0}}}
    with pipe.enable_omni_offload("layer", device=device, **keys), torch.no_grad(), named:
        pipe(x)


def test_models_that_move_together_with_slots_of_their_own_number(make, device, x, made):
    """Of large blocks one streams, of small ones more, as a budget has it: each model finds the slots that it needs, within the budget."""

    class Together(make):
        _co_resident_modules = (("transformer", "transformer_2"),)

        def __init__(self):
            super().__init__()
            self.transformer = Stack(2, width=160).requires_grad_(False)
            self.transformer_2 = Stack(4, width=128).requires_grad_(False)

    with torch.no_grad():
        expected = Together()(x)
    served = set()
    for budget in range(40960, 122880, 1024):
        pipe = Together()
        try:
            backend = pipe.enable_omni_offload("layer", device=device, slots=2, device_memory=budget)
        except OffloadConfigError:
            continue
        made.clear()
        with backend:
            assert torch.equal(pipe(x).cpu(), expected), budget
            assert backend.report().peak_device_bytes <= budget
        served.add(frozenset(made))
    assert any(len(sizes) == 2 for sizes in served), served


@pytest.mark.parametrize("allocation", range(1, 10))
def test_slots_kept_for_nobody_go(make, device, x, allocation):
    """Slots that were kept for a model whose weights then found no memory are freed when the call ends."""
    plain, pipe = make(), make()
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        sim.configure(fail_alloc_in=allocation)
        with contextlib.suppress(torch.OutOfMemoryError):
            pipe(x)
        sim.configure(fail_alloc_in=-1)
        assert len(_residency(backend, "transformer").pool) == 0
        assert torch.equal(pipe(x).cpu(), plain(x))


def test_a_model_with_larger_blocks_within_a_block(make, device, x):
    """The slot in which a smaller block runs stays, and is for no larger one."""
    plain, pipe = make(), make()
    for one in (plain, pipe):
        block, own = one.text_encoder.blocks[1], type(one.text_encoder.blocks[1]).forward
        block.forward = lambda y, one=one, block=block, own=own: own(block, y) + one.transformer(y)
    with pipe.enable_omni_offload("layer", device=device), torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), plain(x))
