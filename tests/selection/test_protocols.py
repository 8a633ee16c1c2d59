"""The protocols and their predicates."""

import pytest

from omni_offload.config import OffloadPlan, encoder_kind
from omni_offload.errors import OffloadConfigError
from omni_offload.protocols import (
    SupportsComponentDiscovery,
    SupportsModelCpuOffload,
    supports_component_discovery,
    supports_model_cpu_offload,
)


class Three:
    _dit_modules = ["transformer"]
    _encoder_modules = []
    _vae_modules = []


class Owner:
    def enable_omni_model_cpu_offload(self, *, device, pin_memory, use_hsdp, offload_components=None):
        return None

    def disable_omni_model_cpu_offload(self):
        return None


class Inheriting(SupportsModelCpuOffload):
    pass


def test_resident_modules_may_be_left_out_of_the_predicate_where_isinstance_fails():
    assert supports_component_discovery(Three())
    assert supports_component_discovery(Three)
    assert not isinstance(Three(), SupportsComponentDiscovery)


@pytest.mark.parametrize("name", ["_dit_modules", "_encoder_modules", "_vae_modules"])
def test_the_three_lists_are_required(name):
    fields = {key: [] for key in ("_dit_modules", "_encoder_modules", "_vae_modules") if key != name}
    assert not supports_component_discovery(type("Two", (), fields)())


def test_an_owner_has_both_methods():
    assert supports_model_cpu_offload(Owner())
    assert isinstance(Owner(), SupportsModelCpuOffload)
    half = Owner()
    half.disable_omni_model_cpu_offload = None
    assert not supports_model_cpu_offload(half)
    assert not supports_model_cpu_offload(object())


def test_the_protocols_bodies_do_nothing():
    owner = Inheriting()
    assert owner.enable_omni_model_cpu_offload(device=None, pin_memory=True, use_hsdp=False) is None
    assert owner.disable_omni_model_cpu_offload() is None


class TestOffloadPlan:
    def test_an_empty_plan_is_the_default(self):
        plan = OffloadPlan()
        assert (plan.block_attrs, plan.offload_submodules, plan.rest_submodules) == ({}, {}, frozenset())
        assert hash(plan) == hash(OffloadPlan())

    def test_lists_become_tuples_and_sets_frozen(self):
        source = {"transformer": ["blocks", "inner.single"]}
        plan = OffloadPlan(block_attrs=source, rest_submodules=["a.b"], resident_dit_paths={"transformer"})
        source["transformer"].append("late")
        assert plan.block_attrs == {"transformer": ("blocks", "inner.single")}
        assert (plan.rest_submodules, plan.resident_dit_paths) == (frozenset({"a.b"}), frozenset({"transformer"}))

    def test_mappings_are_copied(self):
        source = {"mllm": "text_encoder"}
        plan = OffloadPlan(encoder_component_types=source, offload_submodules={"transformer.refiner": "blocks"})
        source.clear()
        assert plan.encoder_component_types == {"mllm": "text_encoder"}

    @pytest.mark.parametrize(
        ("fields", "hint"),
        [
            ({"block_attrs": {"transformer": "blocks"}}, "('blocks',)"),
            ({"block_attrs": {"transformer": [""]}}, "dotted names"),
            ({"block_attrs": {"transformer": ["blocks", "blocks"]}}, "twice"),
            ({"block_attrs": {"": ["blocks"]}}, "the key ''"),
            ({"block_attrs": {3: ["blocks"]}}, "the key 3"),
            ({"block_attrs": ["blocks"]}, "mapping"),
            ({"encoder_block_attrs": {"text_encoder": [3]}}, "encoder_block_attrs"),
            ({"encoder_component_types": {"mllm": "vae"}}, "'text_encoder'"),
            ({"encoder_component_types": "mllm"}, "mapping"),
            ({"offload_submodules": {"transformer.refiner": ("blocks",)}}, "dotted names"),
            ({"offload_submodules": {"a..b": "blocks"}}, "dotted names"),
            ({"rest_submodules": "a.b"}, "set of dotted paths"),
            ({"resident_dit_paths": {3}}, "set of dotted paths"),
            ({"on_demand_component_paths": {"a.": "b"}}, "set of dotted paths"),
            ({"encoder_dlo_weight_replication": [""]}, "set of dotted paths"),
        ],
    )
    def test_each_wrong_field_is_named(self, fields, hint):
        with pytest.raises(OffloadConfigError) as caught:
            OffloadPlan(**fields)
        assert next(iter(fields)) in str(caught.value)
        assert hint in str(caught.value)

    def test_one_error_names_every_field(self):
        with pytest.raises(OffloadConfigError) as caught:
            OffloadPlan(block_attrs=3, offload_submodules=3, rest_submodules=3)
        for name in ("block_attrs", "offload_submodules", "rest_submodules"):
            assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "declared", "kind"),
    [
        ("text_encoder", {}, "text_encoder"),
        ("text_encoder_2", {}, "text_encoder"),
        ("pipe.clip_text_encoder", {}, "text_encoder"),
        ("text_encoder.inner", {}, None),
        ("image_encoder", {}, None),
        ("my_text_encoder_2", {}, None),
        ("mllm", {"mllm": "text_encoder"}, "text_encoder"),
        ("mllm", {"other": "text_encoder"}, None),
    ],
)
def test_an_encoders_kind_is_what_the_plan_says_else_what_its_leaf_name_says(name, declared, kind):
    assert encoder_kind(name, OffloadPlan(encoder_component_types=declared)) == kind
