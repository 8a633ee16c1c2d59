"""Components of pipelines of every shape, and every way in which a declaration is wrong."""

import warnings

import pytest
import torch
from torch import nn

from omni_offload.discovery import (
    Component,
    Problems,
    all_components,
    discover_components,
    find_module,
    module_at,
    nearest,
    refuse_meta,
    resolve_entry_points,
    validate_declarations,
)
from omni_offload.errors import ComponentPathError, OffloadConfigError, OffloadStateError


def _message(pipeline, error=ComponentPathError):
    with pytest.raises(error) as caught:
        discover_components(pipeline)
    return str(caught.value)


def _paths(pipeline):
    return [(component.path, component.kind) for component in discover_components(pipeline)]


class TestShapes:
    @pytest.mark.parametrize("base", [object, nn.Module])
    def test_plain_objects_and_modules_alike(self, kit, base):
        lists = {"dit": ["transformer"], "encoder": ["text_encoder"], "vae": ["vae"], "resident": ["norm"]}
        pipeline = kit.plain(lists, base=base, transformer=kit.Net(), text_encoder=kit.Net(), vae=kit.Net(), norm=kit.Net())
        found = discover_components(pipeline)
        assert [(c.path, c.kind) for c in found] == [
            ("text_encoder", "encoder"),
            ("transformer", "dit"),
            ("vae", "vae"),
            ("norm", "resident"),
        ]
        assert [c.module for c in found] == [pipeline.text_encoder, pipeline.transformer, pipeline.vae, pipeline.norm]

    def test_resident_modules_may_be_left_out(self, kit):
        pipeline = kit.plain({"dit": ["transformer"]}, transformer=kit.Net())
        del type(pipeline)._resident_modules
        assert _paths(pipeline) == [("transformer", "dit")]

    def test_dotted_paths_lead_through_objects_modules_lists_and_mappings(self, kit):
        holder = nn.Module()
        holder.dit = kit.Net()
        thing = type("Thing", (), {})()
        thing.vae = kit.Net()
        pipeline = kit.plain(
            {"dit": ["model.dit", "experts.1", "table.b", "stack.0"], "vae": ["thing.vae"]},
            model=holder,
            thing=thing,
            experts=[None, kit.Net()],
            table={"b": kit.Net()},
            stack=nn.ModuleList([kit.Net()]),
        )
        assert len(_paths(pipeline)) == 5

    def test_declared_order_stands_and_none_takes_part(self, kit):
        pipeline = kit.plain({"dit": ["two", "none", "one", "model.dit"]}, one=kit.Net(), two=kit.Net(), none=None, model=None)
        found = discover_components(pipeline)
        assert [(c.path, c.module is None) for c in found] == [("two", False), ("none", True), ("one", False), ("model.dit", True)]

    def test_one_module_at_two_paths_is_one_component(self, kit):
        net = kit.Net()
        pipeline = kit.plain({"dit": ["a", "b", "c"]}, a=net, b=net, c=net)
        (component,) = discover_components(pipeline)
        assert (component.path, component.aliases, component.module) == ("a", ("b", "c"), net)

    def test_components_compare_by_the_identity_of_their_module(self, kit):
        net = kit.Net()
        one = Component(path="a", kind="dit", module=net)
        assert one == Component(path="a", kind="dit", module=net)
        assert one != Component(path="a", kind="dit", module=kit.Net())

    def test_a_component_without_parameters_takes_part(self, kit):
        assert _paths(kit.plain({"vae": ["vae"]}, vae=nn.Identity())) == [("vae", "vae")]

    def test_undeclared_modules_without_parameters_are_no_matter(self, kit):
        pipeline = kit.plain({"vae": ["vae"]}, vae=kit.Net(), processor=nn.Identity(), scheduler=object())
        assert _paths(pipeline) == [("vae", "vae")]


class TestBadPaths:
    def test_one_error_names_every_path(self, kit):
        pipeline = kit.plain(
            {"dit": ["transfomer", "thing", "model.ditt"], "vae": ["thing.vae"]},
            transformer=kit.Net(),
            thing=3,
            model=nn.ModuleDict({"dit": kit.Net()}),
        )
        message = _message(pipeline)
        for hint in (
            *("'transfomer'", "nearest are 'transformer'", "'thing' leads to a int", "'model.ditt'", "nearest are 'dit'"),
            *("'thing.vae'", "'transformer' (Net) holds parameters", "'model' (ModuleDict) holds parameters"),
        ):
            assert hint in message
        assert message.startswith("Components of Pipe:")

    @pytest.mark.parametrize("path", ["items.5", "items.x", "table.x", "slots.x"])
    def test_containers_name_what_they_have(self, kit, path):
        class Slots:
            __slots__ = ()

        pipeline = kit.plain({"dit": [path]}, items=[None, None], table={"a": None}, slots=Slots())
        message = _message(pipeline)
        assert path in message
        expected = {"items": "known are '0', '1'", "table": "known are 'a'", "slots": "there are none"}
        assert expected[path.partition(".")[0]] in message

    def test_a_path_to_a_class_is_no_module(self, kit):
        assert "not to a torch.nn.Module" in _message(kit.plain({"dit": ["net"]}, net=kit.Net))

    def test_long_lists_of_names_are_cut(self):
        assert nearest("zzz", [f"a{index:02}" for index in range(12)]).endswith("'a09', ...")

    def test_problems_of_types_alone_are_a_config_error(self, kit):
        assert "_dit_modules is 'transformer'" in _message(kit.plain(extra={"_dit_modules": "transformer"}), OffloadConfigError)

    @pytest.mark.parametrize("value", [3, None, [""], ["a..b"], [3], {"a": 1}])
    def test_a_list_holds_dotted_paths(self, kit, value):
        assert "list of dotted paths" in _message(kit.plain(extra={"_vae_modules": value}), OffloadConfigError)

    def test_a_list_left_out_beside_others_is_an_error(self, kit):
        pipeline = kit.plain({"dit": ["transformer"]}, transformer=kit.Net())
        del type(pipeline)._vae_modules
        assert "_vae_modules left out" in _message(pipeline, OffloadConfigError)


class TestOneOwner:
    def test_one_module_of_two_kinds_is_an_error(self, kit):
        net = kit.Net()
        message = _message(kit.plain({"dit": ["a"], "vae": ["b"]}, a=net, b=net))
        assert "'a' (dit) and 'b' (vae) are one module" in message

    def test_a_component_inside_another_is_an_error_that_names_both(self, kit):
        outer = kit.Stacked()
        message = _message(kit.plain({"dit": ["outer"], "vae": ["inner"]}, outer=outer, inner=outer.blocks))
        assert "component 'inner' lies inside component 'outer'" in message

    def test_a_path_inside_a_listed_path_is_an_error(self, kit):
        assert "path 'outer.blocks' lies inside 'outer'" in _message(kit.plain({"dit": ["outer", "outer.blocks"]}, outer=kit.Stacked()))

    def test_a_path_in_two_lists_or_twice_in_one_is_an_error(self, kit):
        message = _message(kit.plain({"dit": ["a", "b", "b"], "vae": ["a"]}, a=kit.Net(), b=kit.Net()))
        assert "'a' stands in _dit_modules and in _vae_modules" in message
        assert "'b' stands in _dit_modules and in _dit_modules" in message


class TestUnlisted:
    @pytest.mark.parametrize("base", [object, nn.Module])
    def test_a_component_that_holds_parameters_is_named(self, kit, base):
        message = _message(kit.plain({"dit": ["transformer"]}, base=base, transformer=kit.Net(), vae=kit.Net()))
        assert "'vae' (Net) holds parameters and stands in no list" in message

    def test_lists_and_mappings_of_modules_are_looked_into(self, kit):
        message = _message(kit.plain({"dit": ["dit"]}, dit=kit.Net(), experts=[1, kit.Net()], table={"a": kit.Net(), "b": 2}))
        assert "'experts.1'" in message
        assert "'table.a'" in message

    def test_a_container_of_components_must_not_hold_parameters_of_its_own(self, kit):
        model = nn.Module()
        model.dit, model.other = kit.Net(), kit.Net()
        model.scale = nn.Parameter(torch.ones(1))
        message = _message(kit.plain({"dit": ["model.dit"]}, model=model))
        assert "'model' holds parameters of its own (scale)" in message
        assert "'model.other' (Net) holds parameters" in message

    def test_a_module_pipeline_must_not_hold_parameters_of_its_own(self, kit):
        pipeline = kit.plain({"dit": ["dit"]}, base=nn.Module, dit=kit.Net(), scale=nn.Parameter(torch.ones(1)))
        assert "'(the pipeline itself)' holds parameters of its own (scale)" in _message(pipeline)

    def test_plain_objects_on_the_way_to_a_component_are_looked_into(self, kit):
        thing = type("Thing", (), {})()
        thing.dit, thing.vae = kit.Net(), kit.Net()
        assert "'thing.vae' (Net)" in _message(kit.plain({"dit": ["thing.dit", "gone.x"]}, thing=thing, gone=None))

    def test_a_wrapper_around_parameters_of_components_is_no_component(self, kit):
        net = kit.Net()
        wrapper = nn.Module()
        wrapper.again = net.layer
        wrapper.scale = net.layer.weight
        assert _paths(kit.plain({"dit": ["dit"]}, dit=net, wrapper=wrapper)) == [("dit", "dit")]
        adapter = nn.Module()
        adapter.inner = net
        assert _paths(kit.plain({"dit": ["dit"]}, dit=net, adapter=adapter)) == [("dit", "dit")]

    def test_modules_that_only_the_components_mapping_lists_are_found(self, kit):
        net = kit.Net()

        class Listing:
            __slots__ = ()
            _dit_modules, _encoder_modules, _vae_modules = [], [], []
            components = {"vae": net, "scheduler": None}

        assert "'vae' (Net)" in _message(Listing())

    def test_a_components_property_that_refuses_is_no_failure(self, kit):
        def refuse(self):
            raise ValueError("other components than in the signature")

        pipeline = kit.plain({"vae": ["vae"]}, extra={"components": property(refuse)}, vae=kit.Net())
        assert _paths(pipeline) == [("vae", "vae")]


def test_all_components_are_those_that_a_pipeline_holds_directly(kit):
    net = kit.Net()
    pipeline = kit.plain(a=net, again=net, experts=[kit.Net()], name="x")
    assert list(all_components(pipeline)) == ["a", "experts.0"]
    module = kit.plain(base=nn.Module, a=net, again=net, items=(kit.Net(),))
    assert list(all_components(module)) == ["a", "items.0"]


class TestUndeclared:
    def test_well_known_names_are_found_with_one_warning_a_class(self, kit):
        class Old:
            def __init__(self):
                self.transformer, self.text_encoder, self.vae = kit.Net(), kit.Net(), kit.Net()
                self.text_encoder_2, self.scheduler = None, object()

        with pytest.warns(DeprecationWarning, match="Old declares no components; text_encoder, transformer, vae"):
            assert _paths(Old()) == [("text_encoder", "encoder"), ("transformer", "dit"), ("vae", "vae")]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            discover_components(Old())

    def test_nothing_well_known_is_an_error(self):
        assert "declares none" in _message(type("Empty", (), {})())

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_component_of_another_name_is_an_error(self, kit):
        assert "'upsampler' (Net)" in _message(kit.plain(declared=False, vae=kit.Net(), upsampler=kit.Net()))


class TestMeta:
    def test_meta_parameters_and_buffers_are_refused_by_name(self, kit):
        net = kit.Net().to("meta")
        net.register_buffer("table", torch.empty(1, device="meta"))
        with pytest.raises(OffloadStateError) as caught:
            refuse_meta({"vae": net, "dit": kit.Net()}, pipeline=kit.plain())
        assert "Pipe" in str(caught.value)
        assert "vae.layer.weight, vae.layer.bias, vae.table" in str(caught.value)

    def test_long_lists_are_cut(self, kit):
        with pytest.raises(OffloadStateError, match="and 2 more"):
            refuse_meta({"dit": nn.Sequential(*(kit.Net() for _ in range(5))).to("meta")}, pipeline=kit.plain())

    def test_loaded_modules_pass(self, kit):
        refuse_meta({"dit": kit.Net()}, pipeline=kit.plain())


class TestDeclarations:
    BASE = {"_dit_modules": ["transformer", "controlnet"], "_encoder_modules": [], "_vae_modules": ["vae"]}

    def _message(self, fields, error=ComponentPathError):
        with pytest.raises(error) as caught:
            validate_declarations(type("Pipe", (), {**self.BASE, **fields}))
        return str(caught.value)

    def test_a_good_class_passes(self):
        fields = {
            "_co_resident_modules": [("controlnet", "transformer")],
            "_offload_entry_points": {"vae": ("encode", "decode"), "vae.post": ["quant"], "": ("encode_prompt",)},
            "encode_prompt": print,
        }
        validate_declarations(type("Pipe", (), {**self.BASE, **fields}))

    def test_a_class_without_lists_is_for_subclassing(self):
        validate_declarations(type("Pipe", (), {"_offload_entry_points": {"vae": ("decode",)}, "_co_resident_modules": [("a", "b")]}))

    def test_what_pipelines_have_in_common_names_their_methods(self):
        """A class that cannot be called yet has no such method itself; a pipeline that extends it must have it."""
        parts = type("Parts", (), {**self.BASE, "_offload_entry_points": {"": ("encode_prompt",)}})
        validate_declarations(parts)
        validate_declarations(type("Pipe", (parts,), {"__call__": print, "encode_prompt": print}))
        with pytest.raises(ComponentPathError, match="'encode_prompt', which Pipe does not have"):
            validate_declarations(type("Pipe", (parts,), {"__call__": print}))

    @pytest.mark.parametrize(
        ("fields", "hint"),
        [
            ({"_vae_modules": ["transformer"]}, "'transformer' stands in _dit_modules and in _vae_modules"),
            ({"_vae_modules": ["vae", "vae"]}, "list it once"),
            ({"_vae_modules": ["transformer.vae"]}, "lies inside 'transformer'"),
            ({"_co_resident_modules": [("controlnt", "transformer")]}, "nearest are 'controlnet'"),
            ({"_offload_entry_points": {"vea": ("decode",)}}, "nearest are 'vae'"),
            ({"_offload_entry_points": {"vaes": ("decode",)}}, "in no listed component"),
            ({"_offload_entry_points": {"": ("missing",)}, "__call__": print}, "which Pipe does not have"),
            ({"_offload_entry_points": {"": ("missing",)}, "forward": print}, "which Pipe does not have"),
            ({"_offload_entry_points": {"": ("field",)}, "field": 3}, "which is a int"),
        ],
    )
    def test_paths_and_methods_that_do_not_exist(self, fields, hint):
        assert hint in self._message(fields)

    @pytest.mark.parametrize(
        ("fields", "hint"),
        [
            ({"_dit_modules": "transformer"}, "_dit_modules is 'transformer'"),
            ({"_co_resident_modules": "ab"}, "_co_resident_modules is 'ab'"),
            ({"_co_resident_modules": ["vae"]}, "holds 'vae'"),
            ({"_co_resident_modules": [("vae",)]}, "two or more"),
            ({"_co_resident_modules": [("vae", "vae")]}, "each once"),
            ({"_co_resident_modules": [("vae", 3)]}, "holds ('vae', 3)"),
            ({"_offload_entry_points": ["decode"]}, "mapping of path"),
            ({"_offload_entry_points": {"vae": "decode"}}, "tuple of method names"),
            ({"_offload_entry_points": {"vae": ("",)}}, "tuple of method names"),
            ({"_offload_entry_points": {"vae": (3,)}}, "tuple of method names"),
            ({"_offload_entry_points": {"vae..x": ("decode",)}}, "the key 'vae..x'"),
            ({"_offload_entry_points": {3: ("decode",)}}, "the key 3"),
        ],
    )
    def test_types(self, fields, hint):
        assert hint in self._message(fields, OffloadConfigError)

    def test_one_error_names_every_problem(self):
        message = self._message({"_dit_modules": ["a", "a"], "_vae_modules": 3, "_offload_entry_points": {"b": ("x",)}})
        for hint in ("'a' stands", "_vae_modules is 3", "names 'b'"):
            assert hint in message


def _generator(self):
    yield 1


async def _coroutine(self):
    return 1


async def _async_generator(self):
    yield 1


@torch.no_grad()
def _wrapped_generator(self):
    yield 1


class TestEntryPoints:
    def _pipeline(self, kit, **extra):
        return kit.plain({"vae": ["vae", "gone"], "dit": ["transformer"]}, vae=kit.Net(), gone=None, transformer=kit.Dit(), extra=extra)

    def test_methods_of_components_and_of_modules_in_them(self, kit):
        pipeline = self._pipeline(kit, encode_prompt=print)
        declared = {"vae": ("encode", "decode", "encode"), "transformer.blocks.1": ("decode",), "gone": ("x",), "": ("encode_prompt",)}
        found = resolve_entry_points(pipeline, declared)
        assert [(e.path, e.component, e.methods) for e in found] == [
            ("vae", "vae", ("encode", "decode")),
            ("transformer.blocks.1", "transformer", ("decode",)),
        ]
        assert [e.module for e in found] == [pipeline.vae, pipeline.transformer.blocks[1]]
        assert found[0] != resolve_entry_points(self._pipeline(kit), {"vae": ("encode", "decode")})[0]

    @pytest.mark.parametrize("function", [_generator, _coroutine, _async_generator, _wrapped_generator])
    def test_functions_that_work_after_they_have_returned_are_refused(self, kit, function):
        pipeline = self._pipeline(kit, stream=function)
        type(pipeline).stream = function
        with pytest.raises(ComponentPathError, match="after it has returned"):
            resolve_entry_points(pipeline, {"": ("stream",)})
        vae = type("Streaming", (kit.Net,), {"stream": function})()
        pipeline.vae = vae
        with pytest.raises(ComponentPathError, match=r"entry point 'vae\.stream' names a method, a generator or coroutine"):
            resolve_entry_points(pipeline, {"vae": ("stream",)})

    @pytest.mark.parametrize(
        ("name", "hint"),
        [("__call__", "a special one of Odd, which Python looks up on the class"), ("lazy", "which is a property of Odd; name a method")],
    )
    def test_what_no_wrapper_can_stand_in_for_is_refused(self, kit, name, hint):
        pipeline = self._pipeline(kit)
        pipeline.vae = type("Odd", (kit.Net,), {"lazy": property(lambda self: self.decode)})()
        with pytest.raises(ComponentPathError, match=f"entry point 'vae.{name}' names a method, {hint}"):
            resolve_entry_points(pipeline, {"vae": (name,)})

    def test_a_call_is_a_method_of_the_class(self, kit):
        pipeline = self._pipeline(kit)
        pipeline.upscale = print
        with pytest.raises(ComponentPathError, match="entry point 'upscale' names a method, which Pipe does not have"):
            resolve_entry_points(pipeline, {"": ("upscale",)})

    def test_one_error_names_every_problem(self, kit):
        with pytest.raises(ComponentPathError) as caught:
            resolve_entry_points(
                self._pipeline(kit),
                {"vae": ("decod", "training"), "vea": ("decode",), "transformer.bloks": ("x",), "": ("encode_prompt",)},
            )
        for hint in (
            *("'vae.decod'", "nearest are 'decode'", "'vae.training'", "which is a bool", "'vea'", "nearest are 'vae'"),
            *("'transformer.bloks'", "nearest are 'blocks'", "'encode_prompt' names a method, which Pipe does not have"),
        ):
            assert hint in str(caught.value)


def test_find_module_starts_anywhere(kit):
    problems = Problems("Test")
    assert isinstance(find_module(kit.Dit(), "blocks.0.layer", problems), nn.Linear)
    assert not problems.found


def test_module_at_is_for_paths_that_must_lead_to_a_module(kit):
    pipeline = kit.plain(experts=[kit.Net()], gone=None)
    assert module_at(pipeline, "experts.0") is pipeline.experts[0]
    with pytest.raises(ComponentPathError, match=r"Module 'gone' of Pipe: it is None"):
        module_at(pipeline, "gone")
    with pytest.raises(ComponentPathError, match=r"path 'other' leads nowhere"):
        module_at(pipeline, "other")
