"""enable_omni_offload: what may be asked for, and what diffusers' own methods may do meanwhile."""

import json

import pytest
import torch
from torch import nn

from omni_offload import (
    ComponentPathError,
    DiffusionParallelConfig,
    OffloadConfig,
    OffloadConfigError,
    OffloadStateError,
    OffloadStrategy,
    OmniDiffusionConfig,
    OmniOffloadMixin,
    resolve_offload_plan,
)
from omni_offload.backends import backend_of
from omni_offload.mixins.interop import upstream_class
from omni_offload.testing import sim

MODULE = OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL)


class Pipe(OmniOffloadMixin):
    _dit_modules = ["net"]
    _encoder_modules = []
    _vae_modules = ["vae"]

    def __init__(self):
        self.net = nn.Linear(8, 8).requires_grad_(False)
        self.vae = nn.Linear(8, 8).requires_grad_(False)

    def __call__(self, x):
        return self.vae(self.net(x))


@pytest.fixture
def pipe(device):
    pipe = Pipe()
    yield pipe
    pipe.disable_omni_offload()
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (None, {}),
        ("module", {"components": ["dit"]}),
        ({"mode": "module"}, {"pin_memory": False}),
        (OmniDiffusionConfig(enable_cpu_offload=True), {}),
        (MODULE, {}),
    ],
)
def test_every_form_of_request(pipe, config, keys):
    """A mode, a selector, an engine's or an own configuration; asked again it is the same backend."""
    assert (pipe.offload_backend, pipe.offload_report) == (None, None)
    with pipe.enable_omni_offload(config, device="sim", **keys) as backend:
        assert pipe.enable_omni_offload(config, device="sim:0", **keys) is backend
        assert pipe.offload_backend is backend
        assert pipe.offload_report.strategy == "model_level"
        assert pipe(torch.ones(1, 8)).device.type == "sim"
    assert pipe.offload_backend is None


def test_a_plan_is_carried_out(pipe):
    """A resolved plan is accepted alone; a key beside it, another plan and another request are refused."""
    plan = resolve_offload_plan(pipe, MODULE)
    backend = pipe.enable_omni_offload(plan, device="sim")
    assert backend.plan is plan
    assert pipe.enable_omni_offload(resolve_offload_plan(pipe, MODULE), device="sim") is backend
    for other in (MODULE, resolve_offload_plan(pipe, OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL, slots=4))):
        with pytest.raises(OffloadStateError, match="was asked for, or another plan; call disable_omni_offload"):
            pipe.enable_omni_offload(other, device="sim")
    with pytest.raises(OffloadConfigError, match="a resolved plan was given together with pin_memory, slots"):
        pipe.enable_omni_offload(plan, slots=3, pin_memory=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"pin_memory": False}), ({"device": "sim:0"}, {"device": "sim:1"}), ({"keep_between_calls": True}, {})],
)
def test_another_request_while_enabled_is_refused(pipe, first, second):
    """Another setting or device needs a disable first."""
    backend = pipe.enable_omni_offload(**{"device": "sim", **first})
    with pytest.raises(OffloadStateError, match=r"Pipe is offloaded on sim:0 with .* was asked for"):
        pipe.enable_omni_offload(**{"device": "sim", **second})
    assert pipe.offload_backend is backend


@pytest.mark.parametrize(
    ("args", "keys", "error"),
    [
        ((OmniDiffusionConfig(),), {}, OffloadConfigError),
        (("modul",), {}, OffloadConfigError),
        ((), {"colour": 3}, OffloadConfigError),
        (("module",), {"mode": "module"}, OffloadConfigError),
        ((MODULE,), {"pin_memory": True}, OffloadConfigError),
        (("auto",), {}, NotImplementedError),
        (("module",), {"device": "cpu"}, OffloadStateError),
        (("module",), {"device": "sim:9"}, OffloadStateError),
        ((OffloadConfig(strategy=OffloadStrategy.LAYERWISE),), {}, (NotImplementedError, OffloadConfigError)),
        (
            (OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL, use_hsdp=True, parallel_config=DiffusionParallelConfig(use_hsdp=True)),),
            {},
            OffloadConfigError,
        ),
    ],
)
def test_what_cannot_be_honoured_raises_before_anything_moves(pipe, args, keys, error):
    """NONE, typos, contradictions, other devices, layer modes, HSDP."""
    with pytest.raises(error):
        pipe.enable_omni_offload(*args, **{"device": "sim", **keys})
    assert backend_of(pipe) is None
    assert "forward" not in pipe.net.__dict__


@pytest.mark.parametrize("value", [None, 5, "net", {"net"}, iter(["net"]), [None]], ids=lambda value: type(value).__name__)
def test_a_list_that_is_none_is_named(pipe, value):
    """Also where it is set on the object alone."""
    pipe._dit_modules = value
    with pytest.raises(ComponentPathError, match=r"_dit_modules is .*; give a list of dotted paths"):
        pipe.enable_omni_offload(device="sim")
    assert backend_of(pipe) is None


def test_no_accelerator_is_an_error(pipe, monkeypatch):
    """Where the factory returns None the mixin raises."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    with pytest.raises(OffloadStateError, match="no accelerator"):
        pipe.enable_omni_offload()


def test_the_pair_is_the_engine(pipe):
    """The pair alone enables and disables; equal again is nothing, other arguments are refused, HSDP too."""
    ask = {"device": torch.device("sim"), "pin_memory": True, "use_hsdp": False}
    for _ in range(2):
        pipe.enable_omni_model_cpu_offload(**ask, offload_components=frozenset({"dit"}))
    backend = pipe.offload_backend
    assert [c.treatment for c in pipe.offload_report.components] == ["rotate", "stay"]
    with pytest.raises(OffloadStateError, match="was asked for"):
        pipe.enable_omni_model_cpu_offload(**ask)
    assert pipe.offload_backend is backend
    pipe.disable_omni_model_cpu_offload()
    pipe.disable_omni_model_cpu_offload()
    with pytest.raises(OffloadConfigError, match="hsdp"):
        pipe.enable_omni_model_cpu_offload(device=torch.device("sim"), pin_memory=True, use_hsdp=True)


def test_the_execution_device(pipe):
    """It is the offload device while enabled; else what the class behind the mixin says."""
    with pytest.raises(AttributeError):
        pipe._execution_device  # noqa: B018
    with pipe.enable_omni_offload(device="sim:1"):
        assert pipe._execution_device == torch.device("sim:1")


diffusers = pytest.importorskip("diffusers")


class OmniDiT(OmniOffloadMixin, diffusers.DiTPipeline):
    _dit_modules = ["transformer"]
    _encoder_modules = []
    _vae_modules = ["vae"]
    _offload_entry_points = {"vae": ("decode",)}


@pytest.fixture
def dit(device):
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        num_embeds_ada_norm=1000,
        sample_size=4,
        norm_num_groups=1,
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=1, latent_channels=4, sample_size=8)
    pipe = OmniDiT(transformer.requires_grad_(False).eval(), vae.requires_grad_(False).eval(), diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    yield pipe
    pipe.disable_omni_offload()
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


def image(pipe):
    return torch.as_tensor(pipe([1], num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images)


def test_a_diffusers_pipeline(dit):
    """A real pipeline is bit-identical on the device, and works there."""
    want = image(dit)
    assert dit._execution_device.type == "cpu"
    with dit.enable_omni_offload(device="sim"):
        assert dit._execution_device == torch.device("sim:0")
        assert torch.equal(image(dit), want)
    assert torch.equal(image(dit), want)


@pytest.mark.parametrize("name", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"])
def test_diffusers_own_offload_is_refused_while_ours_is_on(dit, name):
    """Their offload and ours exclude each other, both ways."""
    with dit.enable_omni_offload(device="sim"), pytest.raises(OffloadStateError, match=f"OmniDiT.{name} was called while omni offload"):
        getattr(dit, name)()


def test_ours_is_refused_while_theirs_is_on(dit):
    """The message names what was found."""
    dit.enable_model_cpu_offload(device="sim")
    with pytest.raises(OffloadStateError, match="has accelerate's"):
        dit.enable_omni_offload(device="sim")
    dit.remove_all_hooks()
    dit.to("cpu")
    dit.enable_omni_offload(device="sim")


def test_moving_the_pipeline_is_refused_casting_is_not(dit):
    """`.to(device)` is refused with the reason in every spelling; `.to(dtype)` casts the masters."""
    dit.enable_omni_offload(device="sim")
    for args, kwargs in (
        (("sim",), {}),
        ((torch.device("cpu"),), {}),
        ((torch.ones(1),), {}),
        ((0,), {}),
        ((), {"device": "sim"}),
        (("cpu", torch.float16), {}),
    ):
        with pytest.raises(OffloadStateError, match=r"OmniDiT.to\(device\) was called while omni offload"):
            dit.to(*args, **kwargs)
    dit.to(torch.float64)
    assert image(dit).dtype.is_floating_point
    assert dit.vae.dtype == torch.float64
    dit.disable_omni_offload()
    dit.to("sim")
    dit.to("cpu")


def test_a_module_pipeline_is_not_moved_either(device):
    """cuda(), xpu() and to_empty() of a module pipeline are refused as well."""

    class Net(OmniOffloadMixin, nn.Module):
        _dit_modules = ["net"]
        _encoder_modules = []
        _vae_modules = []

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 8).requires_grad_(False)

    pipe = Net()
    with pipe.enable_omni_offload(device="sim"):
        for move in (pipe.cuda, pipe.xpu, lambda: pipe.to_empty(device="sim"), lambda: pipe.to("sim")):
            with pytest.raises(OffloadStateError, match="while omni offload"):
                move()


def test_the_saved_class_is_upstreams(dit, tmp_path):
    """While enabled, whole weights are saved, under the name that plain diffusers knows."""
    want = image(dit)
    with dit.enable_omni_offload(device="sim"):
        dit.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "DiTPipeline"
    plain = diffusers.DiTPipeline.from_pretrained(tmp_path)
    assert type(plain) is diffusers.DiTPipeline
    plain.set_progress_bar_config(disable=True)
    for loaded in (plain, OmniDiT.from_pretrained(tmp_path)):  # a mapped file is aligned otherwise: the last digits differ
        loaded.set_progress_bar_config(disable=True)
        assert torch.allclose(image(loaded), want, atol=1e-5)


def test_which_class_is_upstream():
    """The first diffusers pipeline class in line; not a loader mixin, not the base of all pipelines."""

    class Custom(OmniOffloadMixin, diffusers.DiffusionPipeline):
        _dit_modules = []
        _encoder_modules = []
        _vae_modules = []

    from diffusers.loaders import FluxLoraLoaderMixin

    class Flux(FluxLoraLoaderMixin, diffusers.DiTPipeline):
        pass

    assert upstream_class(OmniDiT) is diffusers.DiTPipeline
    assert upstream_class(Flux) is diffusers.DiTPipeline
    assert upstream_class(Custom) is None
    assert upstream_class(Pipe) is None
    assert json.loads(Custom().to_json_string())["_class_name"] == "Custom"
