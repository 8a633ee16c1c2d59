"""Components of another structure are put in the place of others while offload is enabled, in both modes."""

import copy

import attrs
import pytest
import torch
from torch import nn

from omni_offload import ComponentPathError, OffloadConfigError, OffloadPlan, OffloadStateError, resolve_offload_plan
from omni_offload.config import make_config
from omni_offload.testing import sim

MODES = ["module", "layer"]


class Several(nn.Module):
    """Several models as one, as several ControlNets are."""

    def __init__(self, *nets):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x):
        return sum(net(x) for net in self.nets)


class Nothing(nn.Module):
    """Holds no weights."""

    def forward(self, x, cond=None):
        return x


@pytest.fixture(scope="session")
def make(kit):
    """Make a pipeline whose DiT streams in mode `layer`, and whose control model, which may be None, does so too."""

    class Controlled(kit.Pipe):
        _dit_modules = ["control", "transformer"]
        _co_resident_modules = [("control", "transformer")]

        def __init__(self):
            super().__init__()
            self.control = None

        @property
        def _offload_plan(self):
            blocks = (
                [f"nets.{index}.blocks" for index in range(len(self.control.nets))] if isinstance(self.control, Several) else ["blocks"]
            )
            return OffloadPlan(block_attrs={"control": tuple(blocks), "transformer": ("blocks",)})

        def __call__(self, x):
            x = self.encode_prompt(x)
            for step in range(self.steps):
                cond = x if self.control is None else self.control(x)
                x = self.on_step(step, self.transformer(x, cond=cond))
            return self.vae.decode(x)

    return Controlled


@pytest.fixture
def model(kit):
    """Return a function that makes a DiT of so many blocks."""

    def model(depth, seed=0):
        torch.manual_seed(seed)
        return kit.Transformer(depth=depth).requires_grad_(False)

    return model


def wanted(pipe, x):
    """What a copy that is not offloaded makes."""
    return copy.deepcopy(pipe)(x)


def treatments(pipe):
    return {component.path: component.treatment.value for component in pipe.offload_backend.plan.components}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keys", [{}, {"keep_between_calls": True}, {"device_memory": "1MiB"}], ids=str)
def test_a_model_of_another_depth(make, model, x, device, mode, keys):
    """It streams with the blocks that it has; one with a single block, or none, rotates, and the next one streams again."""
    pipe = make()
    pipe.enable_omni_offload(mode, device=device, **keys)
    for depth in (4, 7, 2, 1, 5):
        pipe.transformer = model(depth, seed=depth)
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
        assert treatments(pipe)["transformer"] == ("stream" if mode == "layer" and depth > 1 else "rotate")
        row = next(row for row in pipe.offload_report.components if row.name == "transformer")
        assert row.weight_bytes == sum(parameter.nbytes for parameter in pipe.transformer.parameters())
    pipe.disable_omni_offload()


@pytest.mark.parametrize("mode", MODES)
def test_one_model_and_several(make, model, x, device, mode, kit):
    """None, one, several, one of other depth, and none again: what the pipeline declares of each holds from the next call on."""
    pipe = make()
    pipe.enable_omni_offload(mode, device=device)
    former = []
    for control in (None, model(3, seed=3), Several(model(2, seed=4), model(3, seed=5)), Several(model(2, seed=6)), model(4, seed=7), None):
        former.append(pipe.control)
        pipe.control = control
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
        if control is not None:
            assert treatments(pipe)["control"] == ("stream" if mode == "layer" else "rotate")
            assert pipe.offload_backend.plan.co_residents == (("control", "transformer"),)
        assert all(not kit.hooked(one) for one in former if one is not None)
    pipe.disable_omni_offload()
    assert all(p.device.type == "cpu" for one in former if one is not None for p in one.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_component_that_stays_on_the_device(make, kit, x, device, mode):
    """What is put in its place is brought there by the next call, and the former one to the host."""
    pipe = make()
    former, pipe.text_encoder = pipe.text_encoder, kit.Encoder().requires_grad_(False)
    expected, new, pipe.text_encoder = pipe(x), pipe.text_encoder, former
    pipe.enable_omni_offload(mode, device=device, components=["dit"])
    pipe.text_encoder = new
    assert torch.equal(pipe(x).cpu(), expected)
    assert kit.where(pipe) == {"text_encoder", "vae"}
    assert former.proj.weight.device.type == "cpu"
    pipe.disable_omni_offload()


@pytest.mark.parametrize("mode", MODES)
def test_a_model_without_weights(make, model, x, device, mode):
    """It takes part without effect, and the one after it is managed as ever; also as the only one that would stream."""
    pipe = make()
    pipe.enable_omni_offload(mode, device=device)
    before = treatments(pipe)
    for transformer in (Nothing(), pipe.transformer, Nothing(), model(3)):
        pipe.transformer = transformer
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    assert treatments(pipe) == before
    pipe.disable_omni_offload()


@pytest.mark.parametrize("mode", MODES)
def test_another_component_while_the_model_is_gone(make, kit, x, device, mode):
    """Without the one that streams the others are used, and replaced."""
    pipe = make()
    pipe.enable_omni_offload(mode, device=device)
    model, pipe.transformer = pipe.transformer, None
    pipe.text_encoder = kit.Encoder().requires_grad_(False)
    assert torch.equal(pipe.encode_prompt(x).cpu(), copy.deepcopy(pipe.text_encoder)(x))
    pipe.transformer = model
    assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    assert pipe.text_encoder.proj.weight.device.type == "cpu"
    pipe.disable_omni_offload()


@pytest.mark.parametrize("mode", MODES)
def test_what_lacks_an_entry_point(make, kit, x, device, mode):
    """It is refused by name in each call until it is put right, and then every entry point is hooked again."""
    pipe = make()
    good = pipe.vae
    pipe.enable_omni_offload(mode, device=device)
    pipe.vae = kit.Transformer().requires_grad_(False)
    for _ in range(2):
        with pytest.raises(ComponentPathError, match=r"entry point 'vae\.decode' names a method, which Transformer does not have"):
            pipe(x)
    pipe.vae = good
    assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    assert torch.equal(pipe.vae.decode(x).cpu(), copy.deepcopy(good).decode(x))
    pipe.disable_omni_offload()


@pytest.mark.parametrize("mode", MODES)
def test_two_at_once_of_which_one_fails(make, kit, model, x, device, mode):
    """Neither is managed, hooked or pinned, and what was there before is free, until both can be."""
    pipe = make()
    former = pipe.text_encoder, pipe.transformer
    pipe.enable_omni_offload(mode, device=device)
    pipe.text_encoder = kit.Encoder().requires_grad_(False)
    with torch.device("meta"):
        pipe.transformer = kit.Transformer(depth=3).requires_grad_(False)
    for _ in range(2):
        with pytest.raises(OffloadConfigError, match=r"transformer.*meta"):
            pipe(x)
        for module in (*former, pipe.text_encoder, pipe.transformer):
            assert not kit.hooked(module)
    pipe.transformer = model(3)
    assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    pipe.disable_omni_offload()


def test_fewer_blocks_than_residents(make, model, x, device):
    """Residents that were asked for by number are refused where there are not so many blocks; as many as there are will do."""
    pipe = make()
    pipe.enable_omni_offload("layer", device=device, layer_options={"dit": {"resident_layers": 3}})
    pipe.transformer = model(2)
    for _ in range(2):
        with pytest.raises(OffloadConfigError, match="resident_layers is 3, and component 'transformer' has 2 blocks"):
            pipe(x)
    pipe.transformer = model(3)
    assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    pipe.disable_omni_offload()


@pytest.mark.parametrize("mode", MODES)
def test_one_module_gets_two_names(make, kit, x, device, mode):
    """A component that takes another one's place too is refused: they were two when offload was enabled."""
    pipe = make()
    pipe.control = kit.Transformer().requires_grad_(False)
    pipe.enable_omni_offload(mode, device=device)
    other, pipe.control = pipe.control, pipe.transformer
    for _ in range(2):
        with pytest.raises(OffloadStateError, match="'control' and 'transformer' are one module, and were two when offload was enabled"):
            pipe(x)
    pipe.control = other
    assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    pipe.disable_omni_offload()


def test_the_plan_of_the_others_is_kept(make, model, kit, x, device):
    """What a plan that was given does with components that stay is done on; what came since is planned as was asked for."""
    pipe = make()
    pipe.control = model(3, seed=1)
    plan = resolve_offload_plan(pipe, make_config({"mode": "layer"}))
    changed = {"treatment": "rotate", "block_paths": (), "reason": "it is small"}
    given = attrs.evolve(plan, components=tuple(attrs.evolve(c, **changed) if c.path == "control" else c for c in plan.components))
    pipe.enable_omni_offload(given, device=device)
    pipe.transformer, pipe.vae = model(2, seed=2), kit.Vae().requires_grad_(False)
    assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    assert treatments(pipe) == {"text_encoder": "rotate", "control": "rotate", "transformer": "stream", "vae": "rotate"}
    pipe.control = model(4, seed=3)
    assert torch.equal(pipe(x).cpu(), wanted(pipe, x))
    assert treatments(pipe)["control"] == "stream"
    pipe.disable_omni_offload()


@pytest.mark.parametrize("mode", MODES)
def test_a_component_of_another_pipeline(make, model, x, device, mode):
    """It is shared from the next call on, with its owner, and free when both have given it up."""
    one, other = make(), make()
    other.transformer = model(3, seed=9)
    for pipe in (one, other):
        pipe.enable_omni_offload(mode, device=device)
        pipe(x)
    both = sim.pinned_bytes()
    one.transformer = other.transformer
    assert torch.equal(one(x).cpu(), wanted(one, x))
    assert sim.pinned_bytes() < both
    assert torch.equal(other(x).cpu(), wanted(other, x))
    one.disable_omni_offload()
    assert torch.equal(other(x).cpu(), wanted(other, x))
    other.disable_omni_offload()
    assert sim.pinned_bytes() == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_component_that_another_pipeline_manages_otherwise(make, x, device, mode):
    """It is refused in each call until another one stands there."""
    one, other = make(), make()
    own = one.transformer
    one.enable_omni_offload(mode, device=device)
    other.enable_omni_offload(mode, device=device, pin_memory=False)
    one.transformer = other.transformer
    for _ in range(2):
        with pytest.raises(OffloadStateError, match=r"'transformer' .*is managed for another pipeline"):
            one(x)
    one.transformer = own
    assert torch.equal(one(x).cpu(), wanted(one, x))
    assert torch.equal(other(x).cpu(), wanted(other, x))
    one.disable_omni_offload()
    other.disable_omni_offload()
