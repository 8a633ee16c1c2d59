"""The plan as a value: JSON, digest, difference, text; and the bytes of a module."""

import attrs
import pytest
import torch
from torch import nn

from omni_offload.config import make_config
from omni_offload.errors import OffloadConfigError
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan, Treatment, resolve_offload_plan, weight_bytes


@pytest.fixture
def plan(kit):
    extra = {
        "_co_resident_modules": [("transformer", "vae")],
        "_offload_entry_points": {"vae": ("encode", "decode"), "": ("go",)},
        "go": print,
    }
    pipeline = kit.plain({"dit": ["transformer"], "vae": ["vae", "same"]}, extra=extra, transformer=kit.Dit(), vae=kit.Net())
    pipeline.same = pipeline.vae
    options = {"dit": {"weight_transfer": "rank-local", "checkpoint": "a/b", "resident_layers": 1}}
    return resolve_offload_plan(pipeline, make_config("layer", layer_options=options, device_memory="1GiB"))


def test_json_there_and_back(plan):
    again = ResolvedOffloadPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest() == plan.digest()
    assert again.diff(plan) == ""
    assert str(again) == str(plan)


def test_a_selection_survives_json(kit):
    pipeline = kit.plain({"dit": ["dit"], "vae": ["vae"]}, dit=kit.Net(), vae=kit.Net())
    plan = resolve_offload_plan(pipeline, make_config(components=["vae", "dit"]))
    assert ResolvedOffloadPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"strategy": "fast"}', '{"strategy": "none", "config": 3}'])
def test_text_that_is_no_plan_is_an_error(text):
    with pytest.raises(OffloadConfigError, match="the text is no plan"):
        ResolvedOffloadPlan.from_json(text)


def test_the_digest_is_that_of_the_content(plan):
    assert len(plan.digest()) == 64
    assert attrs.evolve(plan, call_methods=()).digest() != plan.digest()
    assert attrs.evolve(plan, config=attrs.evolve(plan.config, slots=4)).digest() != plan.digest()


def test_a_difference_names_each_value(plan):
    changed = attrs.evolve(
        plan,
        config=attrs.evolve(plan.config, slots=4),
        components=(attrs.evolve(plan.components[0], treatment=Treatment.ROTATE, block_paths=()),),
        co_residents=(),
        call_methods=("run",),
    )
    lines = plan.diff(changed).splitlines()
    assert "config.slots: 3 -> 4" in lines
    assert 'components[transformer].treatment: "stream" -> "rotate"' in lines
    assert 'call_methods: ["go"] -> ["run"]' in lines
    assert "components: transformer, vae -> transformer" in lines
    assert 'components[vae].kind: "vae" -> (none)' in lines
    assert 'components[vae].kind: (none) -> "vae"' in changed.diff(plan).splitlines()


def test_text_for_people(plan):
    assert str(plan).splitlines() == [
        "Pipe: distributed_layerwise",
        "  transformer  dit           stream        96 B  selected (transformer.blocks)",
        "  vae          vae           rotate        24 B  selected",
        "  together: transformer, vae",
    ]


def test_components_are_found_by_path_and_alias(plan):
    assert plan.component("same").path == "vae"
    with pytest.raises(KeyError, match="other"):
        plan.component("other")


def test_a_planned_component_checks_its_treatment():
    with pytest.raises(ValueError, match="fly"):
        PlannedComponent(path="a", kind="dit", treatment="fly", reason="", weight_bytes=0)


class TestBytes:
    def test_parameters_and_buffers_of_all_types(self):
        module = nn.Module()
        module.a = nn.Parameter(torch.zeros(3, 2))
        module.register_buffer("b", torch.zeros(5, dtype=torch.int8))
        module.register_buffer("c", torch.zeros(4, dtype=torch.bfloat16), persistent=False)
        module.register_buffer("empty", torch.zeros(0))
        module.register_buffer("scalar", torch.zeros((), dtype=torch.float64))
        assert weight_bytes(module) == 24 + 5 + 8 + 8

    def test_shared_memory_counts_once(self):
        flat = torch.zeros(10)
        module = nn.Module()
        module.a = nn.Parameter(flat[:6])
        module.b = nn.Parameter(flat[4:10].view(2, 3).t())
        module.c = module.a
        module.inside = nn.Parameter(flat[1:3])
        module.register_buffer("wide", torch.zeros(1).expand(100))
        assert weight_bytes(module) == 40 + 4

    def test_on_the_meta_device_shapes_count(self):
        module = nn.Linear(4, 4, device="meta")
        assert weight_bytes(module) == 80

    def test_wrapper_subclasses_count_by_what_is_inside(self):
        module = nn.Module()
        module.a = nn.Parameter(Pair(torch.zeros(4), torch.zeros(2)))
        assert weight_bytes(module) == 24

    def test_a_module_without_tensors_holds_nothing(self):
        assert weight_bytes(nn.Identity()) == 0


class Pair(torch.Tensor):
    """A tensor of two inner tensors."""

    @staticmethod
    def __new__(cls, one, two):
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one, two):
        self.one, self.two = one, two

    def __tensor_flatten__(self):
        return ["one", "two"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Pair(inner["one"], inner["two"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Pair(args[0].one, args[0].two)
