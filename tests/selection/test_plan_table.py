"""Who goes where: every cell of the documented table, and every request that no cell serves."""

import pytest
import torch
from torch import nn

from omni_offload.config import DLOTransfer, OffloadConfig, OffloadPlan, OffloadStrategy, make_config
from omni_offload.errors import ComponentPathError, OffloadConfigError
from omni_offload.plan import Treatment, resolve_offload_plan, streamed_blocks

LISTS = {
    "dit": ["transformer", "controlnet"],
    "encoder": ["text_encoder", "text_encoder_2", "image_encoder"],
    "vae": ["vae", "audio_vae"],
    "resident": ["norm"],
}
PLAN = OffloadPlan(encoder_block_attrs={"text_encoder": ("blocks",), "image_encoder": ("blocks",), "audio_vae": ("blocks",)})
DISTRIBUTED = {"dit": {"weight_transfer": "rank-local"}}


def _pipeline(kit, *, plan=PLAN, extra=None, lists=LISTS, **components):
    parts = {
        "transformer": kit.Dit(),
        "controlnet": kit.Net(),
        "text_encoder": kit.Stacked(),
        "text_encoder_2": kit.Net(),
        "image_encoder": kit.Stacked(),
        "vae": kit.Net(),
        "audio_vae": kit.Stacked(),
        "norm": kit.Net(),
    }
    return kit.plain(lists, plan=plan, extra=extra, **{**parts, **components})


def _message(pipeline, config, error=OffloadConfigError):
    with pytest.raises(error) as caught:
        resolve_offload_plan(pipeline, config)
    return str(caught.value)


def _treatments(plan):
    return {component.path: component.treatment.value for component in plan.components}


ALL = [path for kind in ("encoder", "dit", "vae", "resident") for path in LISTS[kind]]


@pytest.mark.parametrize(
    ("components", "staying"),
    [
        (None, ["norm"]),
        (["dit"], ["text_encoder", "text_encoder_2", "image_encoder", "vae", "audio_vae", "norm"]),
        (["text_encoder"], ["image_encoder", "transformer", "controlnet", "vae", "audio_vae", "norm"]),
        (["vae"], ["text_encoder", "text_encoder_2", "image_encoder", "transformer", "controlnet", "norm"]),
        (["dit", "vae"], ["text_encoder", "text_encoder_2", "image_encoder", "norm"]),
        (["dit", "text_encoder", "vae"], ["image_encoder", "norm"]),
    ],
)
@pytest.mark.parametrize("mode", ["module", "layer", "distributed"])
def test_every_cell(kit, mode, components, staying):
    options = {} if mode != "distributed" else {(components or ["dit"])[0]: {"weight_transfer": "rank-local"}}
    config = make_config("module" if mode == "module" else "layer", components=components, layer_options=options)
    plan = resolve_offload_plan(_pipeline(kit), config)
    streaming = set()
    if mode != "module":
        streaming = {"transformer", "text_encoder", "image_encoder"} if components is None else {"transformer", "text_encoder", "audio_vae"}
    expected = {path: "stay" if path in staying else "stream" if path in streaming else "rotate" for path in ALL}
    assert _treatments(plan) == expected
    assert [component.path for component in plan.components] == ALL
    reasons = {component.path: component.reason for component in plan.components}
    assert reasons["norm"] == "resident"
    assert all((reason == "not selected") == (path in staying and path != "norm") for path, reason in reasons.items())


def test_kinds_come_from_lists_and_names(kit):
    plan = resolve_offload_plan(_pipeline(kit), make_config())
    assert {component.path: component.kind for component in plan.components} == {
        "transformer": "dit",
        "controlnet": "dit",
        "text_encoder": "text_encoder",
        "text_encoder_2": "text_encoder",
        "image_encoder": "encoder",
        "vae": "vae",
        "audio_vae": "vae",
        "norm": "resident",
    }


def test_an_encoder_is_a_text_encoder_where_the_plan_or_an_alias_says_so(kit):
    net = kit.Net()
    plan = OffloadPlan(encoder_component_types={"mllm": "text_encoder"})
    pipeline = kit.plain({"encoder": ["mllm", "a", "text_encoder"]}, plan=plan, mllm=kit.Net(), a=net, text_encoder=net)
    resolved = resolve_offload_plan(pipeline, make_config(components=["text_encoder"]))
    assert [(c.path, c.kind, c.treatment) for c in resolved.components] == [
        ("mllm", "text_encoder", Treatment.ROTATE),
        ("a", "text_encoder", Treatment.ROTATE),
    ]
    assert resolved.component("text_encoder") is resolved.component("a")


def test_none_and_empty_components_are_left_out(kit):
    pipeline = _pipeline(kit, controlnet=None, text_encoder=None, vae=nn.Identity())
    plan = resolve_offload_plan(pipeline, make_config("layer"))
    assert [c.path for c in plan.components] == [p for p in ALL if p not in ("controlnet", "text_encoder", "vae")]


def test_a_component_of_buffers_alone_has_bytes_to_manage(kit):
    vae = nn.Module()
    vae.register_buffer("mean", torch.zeros(4))
    (component,) = resolve_offload_plan(kit.plain({"vae": ["vae"]}, vae=vae), make_config()).components
    assert (component.treatment, component.weight_bytes) == (Treatment.ROTATE, 16)


def test_a_pipeline_without_declarations_resolves_too(kit):
    pipeline = kit.plain(declared=False, transformer=kit.Stacked(), vae=kit.Net())
    with pytest.warns(DeprecationWarning, match="declares no") as warned:
        plan = resolve_offload_plan(pipeline, make_config("layer"))
    assert _treatments(plan) == {"transformer": "stream", "vae": "rotate"}
    assert len(warned) == 2


class TestLayers:
    def test_block_paths_are_full_paths(self, kit):
        plan = resolve_offload_plan(_pipeline(kit), make_config("layer"))
        assert plan.component("transformer").block_paths == ("transformer.blocks",)
        assert plan.component("text_encoder").block_paths == ("text_encoder.blocks",)
        assert plan.component("controlnet").reason == "selected, no blocks declared"
        assert plan.component("vae").block_paths == ()

    @pytest.mark.parametrize("components", [None, ["dit"]])
    def test_nothing_to_stream_is_an_error_without_a_selection_only(self, kit, components):
        pipeline = _pipeline(kit, transformer=kit.Net(), plan=None)
        config = make_config("layer", components=components)
        if components is None:
            message = _message(pipeline, config)
            assert "there is nothing to stream" in message
            assert "transformer, controlnet" in message
        else:
            assert _treatments(resolve_offload_plan(pipeline, config))["transformer"] == "rotate"

    def test_a_pipeline_without_dits_says_so(self, kit):
        assert "(none)" in _message(kit.plain({"vae": ["vae"]}, vae=kit.Net()), make_config("layer"))

    def test_a_stack_of_one_block_rotates_unless_it_was_asked_for(self, kit):
        pipeline = _pipeline(kit, controlnet=kit.Dit(1))
        plan = resolve_offload_plan(pipeline, make_config("layer"))
        assert plan.component("controlnet").treatment is Treatment.ROTATE
        assert plan.component("controlnet").reason == "selected, one block"
        message = _message(pipeline, make_config("layer", components=["dit"]))
        assert "'controlnet' has a stack of one block (controlnet.blocks.0)" in message

    @pytest.mark.parametrize(
        "options", [{"resident_layers": 1}, {"weight_transfer": "rank-local"}, {"weight_transfer": "rank-local", "checkpoint": "f"}]
    )
    def test_options_ask_for_a_stack_too(self, kit, options):
        pipeline = _pipeline(
            kit, text_encoder_2=kit.Stacked(1), text_encoder=None, plan=OffloadPlan(encoder_block_attrs={"text_encoder_2": ("blocks",)})
        )
        assert "'text_encoder_2' has a stack of one" in _message(pipeline, make_config("layer", layer_options={"text_encoder": options}))
        assert resolve_offload_plan(pipeline, make_config("layer", layer_options={"text_encoder": {"resident_layers": 0}}))

    @pytest.mark.parametrize("kind", ["text_encoder", "vae"])
    def test_options_for_what_does_not_stream_are_an_error(self, kit, kind):
        config = make_config("layer", layer_options={kind: {"resident_layers": 1}})
        assert f"options for '{kind}', of which nothing streams" in _message(_pipeline(kit, plan=None), config)

    def test_resident_layers_count_per_model(self, kit):
        pipeline = _pipeline(kit, controlnet=kit.Dit(4))
        plan = resolve_offload_plan(pipeline, make_config("layer", layer_options={"dit": {"resident_layers": 3}}))
        assert [plan.component(path).resident_layers for path in ("transformer", "controlnet", "text_encoder")] == [3, 3, None]
        message = _message(pipeline, make_config("layer", layer_options={"dit": {"resident_layers": 4}}))
        assert "'transformer' has 3 blocks" in message

    def test_resident_layers_are_for_the_dits_that_may_hold_them(self, kit):
        plan = OffloadPlan(resident_dit_paths={"controlnet"})
        pipeline = _pipeline(kit, plan=plan, controlnet=kit.Dit())
        resolved = resolve_offload_plan(pipeline, make_config("layer", layer_options={"dit": {"resident_layers": 2}}))
        assert [resolved.component(path).resident_layers for path in ("transformer", "controlnet")] == [0, 2]

    def test_transfers_are_resolved_by_kind(self, kit):
        plan = OffloadPlan(encoder_block_attrs=PLAN.encoder_block_attrs, encoder_dlo_weight_replication={"text_encoder"})
        config = make_config("layer", layer_options={"dit": {"weight_transfer": "allgather"}})
        resolved = resolve_offload_plan(_pipeline(kit, plan=plan), config)
        transfers = {c.path: c.transfer for c in resolved.treated(Treatment.STREAM)}
        assert transfers == {
            "transformer": DLOTransfer.ALLGATHER,
            "text_encoder": DLOTransfer.ALLGATHER,
            "image_encoder": DLOTransfer.RANK_LOCAL,
        }
        assert all(c.transfer is None for c in resolve_offload_plan(_pipeline(kit), make_config("layer")).components)

    def test_gathering_what_is_not_equal_on_all_ranks_is_an_error_where_it_was_asked_for(self, kit):
        config = make_config("layer", layer_options={"text_encoder": {"weight_transfer": "allgather"}})
        message = _message(_pipeline(kit), config)
        assert "'text_encoder' has equal weights on all ranks" in message
        assert "encoder_dlo_weight_replication" in message
        config = make_config("layer", layer_options={"text_encoder": {"weight_transfer": "rank-local"}})
        assert resolve_offload_plan(_pipeline(kit), config).component("text_encoder").transfer is DLOTransfer.RANK_LOCAL


class TestRefusals:
    def test_strategy_none(self, kit):
        assert "strategy NONE" in _message(_pipeline(kit), OffloadConfig(strategy=OffloadStrategy.NONE))

    def test_hsdp_at_model_level(self, kit):
        assert "use_hsdp" in _message(_pipeline(kit), OffloadConfig(strategy="model_level", use_hsdp=True))
        assert resolve_offload_plan(_pipeline(kit), OffloadConfig(strategy="layerwise", use_hsdp=True))

    def test_no_bytes_to_manage_says_why(self, kit):
        pipeline = kit.plain(
            {"dit": ["dit"], "encoder": ["text_encoder"], "vae": ["vae"], "resident": ["norm"]},
            dit=None,
            text_encoder=nn.Identity(),
            vae=kit.Net(),
            norm=kit.Net(),
        )
        message = _message(pipeline, make_config(components=["dit", "text_encoder"]))
        for hint in (
            "no bytes to manage",
            "dit (holds no weights)",
            "text_encoder (holds no weights)",
            "vae (not selected)",
            "norm (resident)",
        ):
            assert hint in message
        assert "it lists no components" in _message(kit.plain(), make_config())

    def test_one_error_names_paths_and_requests(self, kit):
        pipeline = _pipeline(kit)
        pipeline.__class__._dit_modules = ["transformer", "controlnt"]
        config = make_config("layer", components=["dit"], layer_options={"dit": {"resident_layers": 9}})
        message = _message(pipeline, config, ComponentPathError)
        for hint in ("Offload (layerwise) of Pipe", "'controlnt'", "'controlnet' (Net) holds parameters", "resident_layers is 9"):
            assert hint in message

    def test_nothing_is_touched(self, kit):
        pipeline = _pipeline(kit)
        before = {name: dict(vars(value)) for name, value in vars(pipeline).items()}
        resolve_offload_plan(pipeline, make_config("layer"))
        assert {name: dict(vars(value)) for name, value in vars(pipeline).items()} == before


class TestWhatThePipelineDeclares:
    def test_co_residents_are_those_that_move(self, kit):
        extra = {"_co_resident_modules": [("controlnet", "transformer"), ("vae", "norm"), ("text_encoder", "text_encoder_2", "vae")]}
        pipeline = _pipeline(kit, extra=extra, text_encoder_2=None)
        assert resolve_offload_plan(pipeline, make_config()).co_residents == (("controlnet", "transformer"), ("text_encoder", "vae"))
        assert resolve_offload_plan(pipeline, make_config(components=["vae"])).co_residents == ()

    def test_co_residents_are_named_by_their_first_path(self, kit):
        net = kit.Net()
        pipeline = kit.plain({"dit": ["a", "b", "c"]}, extra={"_co_resident_modules": [("b", "c"), ("a", "c")]}, a=net, b=net, c=kit.Net())
        assert resolve_offload_plan(pipeline, make_config()).co_residents == (("a", "c"),)

    def test_entry_points_and_calls(self, kit):
        extra = {"_offload_entry_points": {"vae": ("encode", "decode"), "transformer.embed": ("forward",), "": ("go",)}, "go": print}
        plan = resolve_offload_plan(_pipeline(kit, extra=extra), make_config())
        assert plan.entry_points == (("vae", ("encode", "decode")), ("transformer.embed", ("forward",)))
        assert plan.call_methods == ("go",)

    @pytest.mark.parametrize(
        ("extra", "error", "hint"),
        [
            ({"_co_resident_modules": [("controlnt", "transformer")]}, ComponentPathError, "nearest are 'controlnet'"),
            ({"_co_resident_modules": [("vae",)]}, OffloadConfigError, "two or more"),
            ({"_offload_entry_points": {"vae": "decode"}}, OffloadConfigError, "tuple of method names"),
            ({"_offload_entry_points": {"vae": ("decod",)}}, ComponentPathError, "'vae.decod'"),
            ({"_offload_plan": {"block_attrs": {}}}, OffloadConfigError, "_offload_plan is a dict"),
            ({"_offload_plan": property(lambda self: self.net)}, OffloadConfigError, "_offload_plan cannot be read: 'Pipe' object has no"),
        ],
    )
    def test_wrong_declarations(self, kit, extra, error, hint):
        assert hint in _message(_pipeline(kit, plan=None, extra=extra), make_config(), error)

    @pytest.mark.parametrize(
        ("fields", "hint"),
        [
            ({"block_attrs": {"transfomer": ("blocks",)}}, "block_attrs names 'transfomer', no listed dit; nearest are 'transformer'"),
            ({"block_attrs": {"vae": ("blocks",)}}, "no listed dit"),
            ({"encoder_block_attrs": {"transformer": ("blocks",)}}, "no listed encoder or vae"),
            ({"encoder_component_types": {"vae": "text_encoder"}}, "no listed encoder"),
            ({"resident_dit_paths": {"vae"}}, "no listed dit"),
            ({"on_demand_component_paths": {"x"}}, "on_demand_component_paths names 'x'"),
            ({"on_demand_component_paths": {"vae"}}, "Net has no method 'load_to_device'"),
            ({"encoder_dlo_weight_replication": {"transformer"}}, "no listed encoder or vae"),
            ({"offload_submodules": {"vae.layer": "blocks"}}, "offload_submodules names 'vae.layer', inside no such component"),
            ({"offload_submodules": {"transformer": "blocks"}}, "inside no such component"),
            ({"offload_submodules": {"transformer.refiner": "blocks"}}, "'transformer.refiner' leads nowhere"),
            ({"rest_submodules": {"other.x"}}, "rest_submodules names 'other.x', inside no such component"),
            ({"rest_submodules": {"transformer.blocks.7"}}, "'transformer.blocks.7' leads nowhere"),
        ],
    )
    @pytest.mark.parametrize("mode", ["module", "layer"])
    def test_paths_of_the_plan_are_held_against_the_components(self, kit, mode, fields, hint):
        assert hint in _message(_pipeline(kit, plan=OffloadPlan(**fields)), make_config(mode), ComponentPathError)

    def test_on_demand_components_are_marked(self, kit):
        driven = type("Driven", (kit.Net,), {"load_to_device": print, "offload_to_cpu": print})
        plan = OffloadPlan(on_demand_component_paths={"vae", "text_encoder"})
        resolved = resolve_offload_plan(_pipeline(kit, plan=plan, vae=driven(), text_encoder=None), make_config())
        assert [c.path for c in resolved.components if c.on_demand] == ["vae"]

    def test_a_plan_may_name_a_component_that_is_none(self, kit):
        plan = OffloadPlan(block_attrs={"transformer": ("blocks",), "controlnet": ("blocks",)})
        resolved = resolve_offload_plan(_pipeline(kit, plan=plan, controlnet=None), make_config("layer"))
        assert [c.path for c in resolved.treated(Treatment.STREAM)] == ["transformer"]
        assert len(streamed_blocks(_pipeline(kit), resolved.component("transformer"))) == 3
