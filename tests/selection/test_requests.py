"""Requests of every kind: an odd value ends in one `OffloadConfigError` that names everything, never in another exception."""

import itertools
import json
import logging
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_offload import OmniOffloadMixin, get_offload_backend
from omni_offload.config import (
    DiffusionParallelConfig,
    LayerOptions,
    OffloadConfig,
    OffloadPlan,
    OffloadStrategy,
    OmniDiffusionConfig,
    make_config,
    parse_bytes,
    parse_selector,
    rank_layout,
)
from omni_offload.errors import OffloadConfigError, OffloadError, quoted
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan, resolve_offload_plan

FLAGS = {
    "enable_distributed_layerwise_offload": "distributed_layerwise",
    "enable_layerwise_offload": "layerwise",
    "enable_cpu_offload": "model_level",
}


def _message(call, *args, **fields):
    with pytest.raises(OffloadConfigError) as caught:
        call(*args, **fields)
    return str(caught.value)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2).requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.layer(x)


class Pipe(OmniOffloadMixin):
    _vae_modules = ["vae"]

    def __init__(self):
        self.vae = Net()


# ---- the text of one large error ----


def test_the_text_of_an_error_with_every_key_wrong():
    """Keys in the order of their reading, each with what was found and what to do."""
    selector = {
        "mdoe": "layer",
        "mode": "layers",
        "components": ["dit", "dit", "unet"],
        "layer_options": {"vae": {"resident_layer": 1}, "dit": {"weight_transfer": "gather", "resident_layers": -1, "checkpoint": 3}},
        "pin_memory": "yes",
        "slots": 1.0,
        "keep_between_calls": 1,
        "device_memory": "12",
        "host_memory": -1,
    }
    size = "is not a size; give bytes as an int >= 0 and < 2**63, or a string like '12GiB' or '800MiB'"
    assert _message(parse_selector, selector) == (
        "The selector cannot be read: the selector has an unknown key 'mdoe'; did you mean 'mode'?; "
        "mode is 'layers'; did you mean 'layer'?; "
        "components names 'dit' 2 times; name it once; components names 'unet'; known are dit, text_encoder, vae; "
        "layer_options.vae has an unknown key 'resident_layer'; did you mean 'resident_layers'?; "
        "layer_options.dit.weight_transfer is 'gather'; did you mean 'allgather'?; "
        "layer_options.dit.resident_layers is -1; give an int >= 0 and < 2**31; "
        "layer_options.dit.checkpoint is 3; give a path; "
        "pin_memory is 'yes'; give True or False; slots is 1.0; give an int >= 2 and < 2**31; "
        f"keep_between_calls is 1; give True or False; device_memory: '12' {size}; host_memory: -1 {size}"
    )


def test_long_and_broken_values_are_quoted_in_short():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert quoted(Broken()).endswith("Broken whose repr fails>")
    assert quoted(10**5000) == "<int whose repr fails>"
    assert len(quoted("x" * 10_000)) < 200
    assert len(_message(make_config, nn.Sequential(*(nn.Linear(2, 2) for _ in range(200))))) < 400


# ---- the legacy booleans ----


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)), ids=str)
def test_the_factory_logs_each_request_that_lost(device, caplog, flags):
    """All eight combinations: the strongest wins, each other that was set has one line, and nothing else is logged."""
    given_flags = dict(zip(FLAGS, flags, strict=True))
    asked = [name for name, flag in given_flags.items() if flag]
    with caplog.at_level(logging.DEBUG, logger="omni_offload"):
        backend = get_offload_backend(OmniDiffusionConfig(**given_flags), device)
    assert (None if backend is None else backend.config.strategy.value) == (FLAGS[asked[0]] if asked else None)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", f"offload strategy {FLAGS[asked[0]]} overrides the request for {name}") for name in asked[1:]
    ]


def test_the_mixin_logs_them_too(device, caplog):
    """A request that loses is named wherever it was made."""
    pipeline = Pipe()
    config = OmniDiffusionConfig(enable_cpu_offload=True, enable_layerwise_offload=True)
    with caplog.at_level(logging.INFO, logger="omni_offload"), pytest.raises((OffloadConfigError, NotImplementedError)):
        pipeline.enable_omni_offload(config, device=device)
    assert "offload strategy layerwise overrides the request for enable_cpu_offload" in caplog.messages


# ---- what else may be handed in ----


@pytest.mark.parametrize("value", [None, "layer", b"layer", 3, 1.5, True, {}, {"mode": "layer"}, [], (), set(), OmniDiffusionConfig, Pipe])
def test_what_can_have_no_fields_is_no_engine_config(device, value):
    """Every attribute of such a value is missing: taken for a configuration it would silently ask for nothing."""
    assert "no configuration; a selector goes into its field" in _message(OffloadConfig.from_od_config, value)
    assert "no configuration" in _message(get_offload_backend, value, device)


def test_an_offload_config_is_taken_as_it_is():
    config = OffloadConfig(strategy="layerwise")
    assert OffloadConfig.from_od_config(config) is config


def test_an_object_that_answers_to_every_name_is_refused_by_every_field():
    """A stand-in that makes up attributes asks for nothing that can be read."""

    class Anything:
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

    message = _message(OffloadConfig.from_od_config, Anything())
    for field in attrs.fields(OmniDiffusionConfig):
        if field.name != "diffusion_offload_config":
            assert field.name in message
    assert "the selector is" in message


def test_an_error_of_the_engines_own_code_passes_unchanged():
    class Config:
        @property
        def pin_cpu_memory(self):
            raise RuntimeError("not ready")

    with pytest.raises(RuntimeError, match="not ready"):
        OffloadConfig.from_od_config(Config())


def test_the_factory_takes_a_resolved_plan(device):
    pipeline = Pipe()
    plan = resolve_offload_plan(pipeline, make_config())
    backend = get_offload_backend(plan, device)
    backend.enable(pipeline)
    assert backend.plan is plan
    backend.disable()


def test_a_mesh_is_a_mesh(device):
    assert "mesh is 'dp'" in _message(get_offload_backend, OffloadConfig(strategy="model_level"), device, mesh="dp")
    assert "mesh is 3" in _message(Pipe().enable_omni_offload, device=device, mesh=3)


def test_a_mesh_asks_for_nothing(device):
    """Where nothing is gathered a rank is on its own, and a mesh makes no other request of the same one."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        pipeline = Pipe()
        with pipeline.enable_omni_offload("module", device=device, mesh=mesh) as backend:
            assert pipeline.enable_omni_offload("module", device=device) is backend
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("config", ["auto", {"mode": "auto"}])
def test_auto_is_refused_by_the_mixin_and_the_factory(device, config):
    """There is no planner yet, and nothing is enabled instead."""
    pipeline = Pipe()
    with pytest.raises(NotImplementedError, match="needs a planner"):
        pipeline.enable_omni_offload(config, device=device)
    assert pipeline.offload_backend is None
    with pytest.raises(NotImplementedError, match="needs a planner"):
        get_offload_backend(OmniDiffusionConfig(diffusion_offload_config={"mode": "auto"}), device)


@pytest.mark.parametrize("config", [OmniDiffusionConfig(), OffloadConfig(strategy="none"), SimpleNamespace(enable_cpu_offload=False)])
def test_what_resolves_to_none_is_no_backend_for_the_factory_and_an_error_for_the_mixin(device, config):
    assert get_offload_backend(config, device) is None
    assert "resolves to NONE" in _message(Pipe().enable_omni_offload, config, device=device)


# ---- values that nothing reads ----


@pytest.mark.parametrize("strategy", ["none", "model_level", "layerwise"])
def test_transfers_beside_a_strategy_that_is_not_distributed_are_an_error(strategy):
    assert "dlo_transfers stand beside" in _message(OffloadConfig, strategy=strategy, dlo_transfers={"dit": "rank-local"})


def test_a_transfer_of_what_is_not_selected_is_an_error():
    message = _message(OffloadConfig, strategy="distributed_layerwise", components=["dit"], dlo_transfers={"vae": "rank-local"})
    assert "dlo_transfers names 'vae', which components leaves out" in message


@pytest.mark.parametrize("limit", [float("inf"), float("nan"), -1, 2**33])
def test_a_registration_limit_is_finite(limit):
    assert "GiB" in _message(OmniDiffusionConfig, dlo_host_registration_limit_gib=limit)


def test_none_in_a_parallel_config_is_the_default():
    """It is stored as the default, so that whoever computes with it finds numbers."""
    fields = {field.name: None for field in attrs.fields(DiffusionParallelConfig)}
    assert DiffusionParallelConfig(**fields) == DiffusionParallelConfig()


@pytest.mark.parametrize(
    "value", ["9" * 30 + "GiB", "9007199254740992TiB", 2**63, pytest.param(10**5000, id="huge"), "1." + "1" * 30 + "GiB"]
)
def test_a_size_is_one_that_memory_can_have(value):
    assert "is not a size" in _message(parse_bytes, value)


# ---- fuzzing ----

_FUZZ = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
_JUNK = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 6), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)),
    *(st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)),
    *(st.just(object()), st.just(int), st.builds(lambda: 10**5000), st.just("9" * 5000 + "GiB")),
)
_KIND = st.sampled_from(["dit", "text_encoder", "vae", "ditt", "", 3, None])
_OPTION = st.sampled_from([field.name for field in attrs.fields(LayerOptions)] + ["x"])
_OPTIONS = st.dictionaries(_OPTION, st.one_of(_JUNK, st.sampled_from(["allgather", "rank-local", "spread"])), max_size=4)
_SELECTOR_VALUES = {
    "mode": st.sampled_from(["module", "layer", "auto"]),
    "components": st.lists(_KIND, max_size=3),
    "layer_options": st.dictionaries(_KIND, st.one_of(_OPTIONS, _JUNK), max_size=3),
    "pin_memory": st.booleans(),
    "slots": st.integers(0, 5),
    "keep_between_calls": st.booleans(),
    "device_memory": st.sampled_from(["12GiB", "0GiB", 5, 0]),
    "host_memory": st.sampled_from(["1KB", 0]),
}
_SELECTORS = st.fixed_dictionaries({}, optional={name: st.one_of(value, _JUNK) for name, value in _SELECTOR_VALUES.items()})
_LEGACY = {name: st.one_of(st.booleans(), _JUNK) for name in (*FLAGS, "pin_cpu_memory", "dlo_use_allgather")} | {
    "dlo_resident_layers": st.one_of(st.integers(0, 3), _JUNK),
    "dlo_host_registration_limit_gib": st.one_of(st.floats(), _JUNK),
    "parallel_config": st.one_of(_JUNK, st.builds(SimpleNamespace, data_parallel_size=_JUNK, use_hsdp=_JUNK)),
}


def _outcome(call, *args, **fields):
    """What a call returns; None where it refuses as it may. An error stays readable."""
    try:
        return call(*args, **fields)
    except (NotImplementedError, OffloadConfigError) as error:
        text = str(error)
        kind = type(error)
    assert len(text) < 6000
    assert kind is OffloadConfigError or "planner" in text
    return None


def _require_stable(config):
    """A configuration resolves to itself, can be hashed, and survives JSON."""
    if config is None:
        return
    assert attrs.evolve(config) == config
    assert isinstance(hash(config), int)
    text = json.dumps(attrs.asdict(config), default=lambda value: sorted(value) if isinstance(value, frozenset) else str(value))
    assert OffloadConfig.from_fields(json.loads(text)) == config


@_FUZZ
@given(_SELECTORS)
def test_any_selector_is_a_configuration_or_one_error(selector):
    _require_stable(_outcome(make_config, selector))
    _outcome(make_config, None, **selector)


@_FUZZ
@given(st.fixed_dictionaries({}, optional={**_LEGACY, "diffusion_offload_config": st.one_of(_JUNK, _SELECTORS)}))
def test_any_engine_config_is_a_configuration_or_one_error(fields):
    """What our own class refuses, any object with such fields is refused for, and the other way round."""
    config = _outcome(OffloadConfig.from_od_config, SimpleNamespace(**fields))
    _require_stable(config)
    own = _outcome(OmniDiffusionConfig, **fields)
    assert config == (None if own is None else _outcome(OffloadConfig.from_od_config, own))


@_FUZZ
@given(
    st.one_of(_JUNK, st.sampled_from(list(OffloadStrategy))),
    st.fixed_dictionaries(
        {},
        optional={name: _LEGACY[name] for name in _LEGACY if name not in FLAGS}
        | {
            name: st.one_of(_SELECTOR_VALUES[name], _JUNK)
            for name in ("components", "layer_options", "slots", "device_memory", "host_memory")
        }
        | {"use_hsdp": _JUNK, "dp_size": _JUNK, "dlo_transfers": st.one_of(_JUNK, st.dictionaries(_KIND, _JUNK, max_size=2))},
    ),
)
def test_any_fields_are_a_configuration_or_one_error(strategy, fields):
    _require_stable(_outcome(OffloadConfig, strategy=strategy, **fields))


_NAMES = st.one_of(st.text(alphabet="ab.", max_size=4), _JUNK)
_KEYS = st.one_of(st.text(alphabet="ab.", max_size=4), st.integers(), st.none())
_DECLARED = st.one_of(
    _JUNK, st.dictionaries(_KEYS, st.one_of(_NAMES, st.lists(_NAMES, max_size=2)), max_size=2), st.lists(_NAMES, max_size=2)
)


@_FUZZ
@given(st.fixed_dictionaries({}, optional={field.name: _DECLARED for field in attrs.fields(OffloadPlan)}))
def test_any_declaration_is_a_plan_or_one_error(fields):
    plan = _outcome(OffloadPlan, **fields)
    assert plan is None or isinstance(hash(plan), int)


@_FUZZ
@given(
    st.dictionaries(st.sampled_from([f.name for f in attrs.fields(DiffusionParallelConfig)]), st.one_of(_JUNK, st.integers(1, 3))),
    st.integers(1, 8),
)
def test_any_parallel_sizes_are_a_layout_or_one_error(fields, world):
    parallel = _outcome(DiffusionParallelConfig, **fields)
    if parallel is not None:
        _outcome(rank_layout, parallel, world_size=world)


# ---- plans ----


@pytest.fixture(scope="module")
def plan_text():
    pipeline = Pipe()
    text = resolve_offload_plan(pipeline, make_config()).to_json()
    assert ResolvedOffloadPlan.from_json(text).to_json() == text
    return text


_VALUES = [None, 3, -1, "x", "", [], {}, True, 1.5, ["a"], [["a"]], {"a": 1}, ["a", "b"], "a..b", ["a", "a"]]


def _places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def test_any_changed_plan_is_read_whole_or_refused(plan_text):
    """Every value replaced by every other kind of value, and removed: what is read is a value like any plan."""
    accepted = 0
    for path in list(_places(json.loads(plan_text)))[1:]:
        for value in [*_VALUES, KeyError]:
            fields = json.loads(plan_text)
            holder = fields
            for key in path[:-1]:
                holder = holder[key]
            if value is KeyError:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            try:
                plan = ResolvedOffloadPlan.from_json(json.dumps(fields))
            except OffloadConfigError:
                continue
            accepted += 1
            assert ResolvedOffloadPlan.from_json(plan.to_json()) == plan
            assert hash(plan) == hash(ResolvedOffloadPlan.from_json(plan.to_json()))
            assert str(plan)
    assert accepted > 10


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"path": "a..b"}, "path is 'a..b'"),
        ({"kind": "unet"}, "kind is 'unet'"),
        ({"aliases": "ab"}, "aliases is 'ab'"),
        ({"aliases": ("b", "b")}, "each once"),
        ({"rest_paths": (3,)}, "rest_paths is (3,)"),
        ({"weight_bytes": True}, "weight_bytes is True"),
        ({"weight_bytes": -1}, "weight_bytes is -1"),
        ({"resident_layers": 1.0}, "resident_layers is 1.0"),
        ({"reason": None}, "reason is None"),
        ({"on_demand": 1}, "on_demand is 1"),
        ({"treatment": "stream"}, "blocks are for what streams"),
        ({"block_paths": ("a.blocks",)}, "blocks are for what streams"),
        ({"treatment": "stream", "block_paths": ("b.blocks",)}, "'b.blocks' lies outside component 'a'"),
        ({"treatment": "stream", "block_paths": ("a.blocks",), "rest_paths": ("ab.x",)}, "'ab.x' lies outside"),
    ],
)
def test_every_value_of_a_planned_component_is_checked(fields, hint):
    good = {"path": "a", "kind": "dit", "treatment": "rotate", "reason": "", "weight_bytes": 1}
    assert PlannedComponent(**good)
    assert hint in _message(PlannedComponent, **{**good, **fields})


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"pipeline_class": ""}, "pipeline_class is ''"),
        ({"strategy": OffloadStrategy.LAYERWISE}, "give one and the same"),
        ({"config": OffloadConfig(strategy="none"), "strategy": OffloadStrategy.NONE}, "give one and the same"),
        ({"components": ()}, "give those to manage"),
        ({"co_residents": (("vae", "dit"),)}, "co_residents names 'dit', no component"),
        ({"co_residents": (("vae",),)}, "two or more paths"),
        ({"entry_points": (("vae", "decode"),)}, "entry_points is"),
        ({"entry_points": ("vae",)}, "entry_points is"),
        ({"call_methods": ("",)}, "call_methods is"),
    ],
)
def test_every_value_of_a_plan_is_checked(fields, hint, plan_text):
    assert hint in _message(attrs.evolve, ResolvedOffloadPlan.from_json(plan_text), **fields)


def test_a_plan_names_a_component_once(plan_text):
    plan = ResolvedOffloadPlan.from_json(plan_text)
    twice = (*plan.components, attrs.evolve(plan.components[0], path="b", aliases=("vae",)))
    assert "component 'vae' stands 2 times" in _message(attrs.evolve, plan, components=twice)


# ---- modules whose bytes cannot be counted ----


def test_weights_without_a_shape_are_refused_by_name():
    """A lazy module would hold no bytes now and many later, and so go unmanaged."""
    pipeline = Pipe()
    pipeline.vae = nn.Sequential(Net(), nn.LazyLinear(3), nn.LazyBatchNorm1d())
    message = _message(resolve_offload_plan, pipeline, make_config())
    assert "vae.1.weight, vae.1.bias" in message
    assert "vae.2.running_mean" in message
    assert "run 'vae' once" in message


def test_resolving_touches_nothing():
    """No attribute is set and no tensor is read, moved or rebound: neither by what succeeds nor by what is refused."""
    pipeline = Pipe()
    tensors = [*pipeline.vae.parameters()]
    before = [(id(t), t._version, t.data_ptr(), t.grad_fn) for t in tensors]
    fields, inner, cls = dict(vars(pipeline)), {m: dict(vars(m)) for m in pipeline.vae.modules()}, dict(vars(Pipe))
    config = make_config()
    plan = resolve_offload_plan(pipeline, config)
    with pytest.raises(OffloadError):
        resolve_offload_plan(pipeline, make_config("layer"))
    assert vars(pipeline) == fields
    assert {m: dict(vars(m)) for m in pipeline.vae.modules()} == inner
    assert dict(vars(Pipe)) == cls
    assert [(id(t), t._version, t.data_ptr(), t.grad_fn) for t in pipeline.vae.parameters()] == before
    assert plan == resolve_offload_plan(pipeline, config)
    assert plan.config is config
    with torch.device("meta"):
        abstract = Pipe()
    assert resolve_offload_plan(abstract, config).components == plan.components
