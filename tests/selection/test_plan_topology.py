"""Blocks: where they are declared, what a declaration leads to, and who owns them."""

import warnings

import pytest
import torch
from torch import nn

from omni_offload.config import OffloadPlan, make_config
from omni_offload.errors import ComponentPathError, OffloadConfigError
from omni_offload.plan import Treatment, resolve_offload_plan, streamed_blocks, streamed_parameters

LAYER = make_config("layer")
DISTRIBUTED = make_config("layer", layer_options={"dit": {"weight_transfer": "rank-local"}})


class Parts(nn.Module):
    """A DiT with containers of every kind."""

    def __init__(self, net):
        super().__init__()
        self.embed = net()
        self.blocks = nn.ModuleList([net(), net()])
        self.named = nn.ModuleDict({"a": net(), "b": net()})
        self.chain = nn.Sequential(net(), nn.SiLU(), net())
        self.single = net()
        self.nested = nn.ModuleList([nn.ModuleList([net()]), nn.ModuleDict({"x": net()})])
        self.sparse = nn.ModuleList([net(), nn.Identity(), net()])
        self.nothing = None
        self.inner = nn.Module()
        self.inner.blocks = nn.ModuleList([net(), net()])


def _dit(kit, **declared):
    return type("Declared", (Parts,), declared)(kit.Net)


def _pipeline(kit, dit, plan=None, **others):
    return kit.plain({"dit": ["dit", *others]}, plan=plan, dit=dit, **others)


def _blocks(pipeline, config=LAYER):
    plan = resolve_offload_plan(pipeline, config)
    return [path for path, _ in streamed_blocks(pipeline, plan.component("dit"))]


def _message(pipeline, config=LAYER, error=OffloadConfigError):
    with pytest.raises(error) as caught:
        resolve_offload_plan(pipeline, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        (["blocks"], ["blocks.0", "blocks.1"]),
        (["named"], ["named.a", "named.b"]),
        (["chain"], ["chain.0", "chain.2"]),
        (["nested"], ["nested.0.0", "nested.1.x"]),
        (["sparse"], ["sparse.0", "sparse.2"]),
        (["inner.blocks"], ["inner.blocks.0", "inner.blocks.1"]),
        (["single", "blocks.1", "nothing"], ["single", "blocks.1"]),
        (("named", "blocks"), ["named.a", "named.b", "blocks.0", "blocks.1"]),
    ],
)
@pytest.mark.parametrize("where", ["plan", "class"])
def test_containers_and_single_blocks_in_declared_order(kit, where, names, blocks):
    if where == "plan":
        pipeline = _pipeline(kit, _dit(kit), OffloadPlan(block_attrs={"dit": names}))
    else:
        pipeline = _pipeline(kit, _dit(kit, _layerwise_offload_blocks_attrs=names))
    assert _blocks(pipeline) == [f"dit.{block}" for block in blocks]


def test_containers_that_are_none_or_empty_are_not_planned(kit):
    pipeline = _pipeline(kit, _dit(kit), OffloadPlan(block_attrs={"dit": ("nothing", "blocks")}))
    assert resolve_offload_plan(pipeline, LAYER).component("dit").block_paths == ("dit.blocks",)


def test_a_sequence_with_a_forward_of_its_own_is_one_block(kit):
    class Own(nn.Sequential):
        def forward(self, x):
            return x

    dit = _dit(kit)
    dit.own = Own(kit.Net(), kit.Net())
    assert _blocks(_pipeline(kit, dit, OffloadPlan(block_attrs={"dit": ("own", "single")}))) == ["dit.own", "dit.single"]


def test_a_list_may_hold_none(kit):
    dit = _dit(kit)
    dit.blocks._modules["2"] = None
    dit.chain._modules["3"] = None
    pipeline = _pipeline(kit, dit, OffloadPlan(block_attrs={"dit": ("blocks", "chain")}))
    assert _blocks(pipeline) == ["dit.blocks.0", "dit.blocks.1", "dit.chain.0", "dit.chain.2"]


class TestPrecedence:
    def test_the_plan_then_the_class_then_the_singular(self, kit):
        both = {"_layerwise_offload_blocks_attrs": ["named"], "_layerwise_offload_blocks_attr": "nested"}
        assert _blocks(_pipeline(kit, _dit(kit, **both), OffloadPlan(block_attrs={"dit": ("blocks",)})))[0] == "dit.blocks.0"
        assert _blocks(_pipeline(kit, _dit(kit, **both)))[0] == "dit.named.a"

    def test_the_singular_warns_once_a_class(self, kit):
        dit = _dit(kit, _layerwise_offload_blocks_attr="blocks")
        with pytest.warns(DeprecationWarning, match="Declared._layerwise_offload_blocks_attr is deprecated"):
            assert _blocks(_pipeline(kit, dit)) == ["dit.blocks.0", "dit.blocks.1"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(_blocks(_pipeline(kit, type(dit)(kit.Net)))) == 2

    def test_an_empty_declaration_stands(self, kit):
        dit = _dit(kit, _layerwise_offload_blocks_attrs=["blocks"])
        assert "nothing to stream" in _message(_pipeline(kit, dit, OffloadPlan(block_attrs={"dit": ()})))

    def test_well_known_names_count_in_distributed_offload_with_one_warning_a_class(self, kit):
        assert "nothing to stream" in _message(_pipeline(kit, _dit(kit)))
        dit = _dit(kit)
        with pytest.warns(DeprecationWarning, match="Declared declares no blocks; blocks were found"):
            assert _blocks(_pipeline(kit, dit), DISTRIBUTED) == ["dit.blocks.0", "dit.blocks.1"]
        assert len(_blocks(_pipeline(kit, type(dit)(kit.Net)), DISTRIBUTED)) == 2

    def test_no_well_known_name_is_no_blocks(self, kit):
        assert "of which nothing streams" in _message(_pipeline(kit, kit.Net()), DISTRIBUTED)

    @pytest.mark.parametrize(
        "declared",
        [
            {"_layerwise_offload_blocks_attrs": "blocks"},
            {"_layerwise_offload_blocks_attrs": [3]},
            {"_layerwise_offload_blocks_attrs": [""]},
        ],
    )
    def test_class_attributes_of_another_type_are_an_error(self, kit, declared):
        assert "give a list of names" in _message(_pipeline(kit, _dit(kit, **declared)))

    def test_a_singular_of_another_type_is_an_error(self, kit):
        dit = _dit(kit, _layerwise_offload_blocks_attr=["blocks"])
        with pytest.warns(DeprecationWarning, match="is deprecated"):
            assert "give a list of names" in _message(_pipeline(kit, dit))

    def test_a_declaration_by_an_alias_counts(self, kit):
        dit = _dit(kit)
        pipeline = kit.plain({"dit": ["dit", "also"]}, plan=OffloadPlan(block_attrs={"also": ("blocks",)}), dit=dit, also=dit)
        assert _blocks(pipeline) == ["dit.blocks.0", "dit.blocks.1"]

    def test_large_children_stream_by_their_own_container(self, kit):
        plan = OffloadPlan(block_attrs={"dit": ("blocks",)}, offload_submodules={"dit.inner": "blocks"})
        paths = resolve_offload_plan(_pipeline(kit, _dit(kit), plan), LAYER).component("dit").block_paths
        assert paths == ("dit.inner.blocks", "dit.blocks")


class TestMistakes:
    def test_a_missing_container_is_named_with_the_nearest(self, kit):
        message = _message(_pipeline(kit, _dit(kit, _layerwise_offload_blocks_attrs=["bloks", "embed.x"])), error=ComponentPathError)
        assert "'dit.bloks' leads nowhere" in message
        assert "nearest are 'blocks'" in message
        assert "'dit.embed.x'" in message

    def test_a_block_in_two_containers_is_an_error(self, kit):
        dit = _dit(kit)
        dit.again = nn.ModuleList([dit.blocks[1], kit.Net()])
        message = _message(_pipeline(kit, dit, OffloadPlan(block_attrs={"dit": ("blocks", "again")})))
        assert "'dit.blocks.1' and 'dit.again.0' are one module" in message

    def test_a_block_twice_in_one_list_is_an_error(self, kit):
        dit = _dit(kit)
        dit.blocks.append(dit.blocks[0])
        assert "'dit.blocks.0' and 'dit.blocks.2' are one module" in _message(
            _pipeline(kit, dit, OffloadPlan(block_attrs={"dit": ("blocks",)}))
        )

    def test_a_block_inside_a_block_is_an_error(self, kit):
        message = _message(_pipeline(kit, _dit(kit), OffloadPlan(block_attrs={"dit": ("inner", "inner.blocks")})))
        assert "block 'dit.inner.blocks.0' lies inside block 'dit.inner'" in message

    def test_a_block_of_two_components_is_an_error(self, kit):
        dit, other = _dit(kit), _dit(kit)
        other.blocks[0] = dit.blocks[0]
        plan = OffloadPlan(block_attrs={"dit": ("blocks",), "other": ("blocks",)})
        assert "'dit.blocks.0' and 'other.blocks.0' are one module" in _message(_pipeline(kit, dit, plan, other=other))

    def test_rest_submodules_lie_inside_blocks(self, kit):
        plan = OffloadPlan(block_attrs={"dit": ("blocks",)}, rest_submodules={"dit.embed.layer", "dit.blocks.0", "dit.blocks.1.layer"})
        message = _message(_pipeline(kit, _dit(kit), plan), error=ComponentPathError)
        assert "'dit.embed.layer', which is in no block" in message
        assert "'dit.blocks.0', which is in no block" in message
        assert "'dit.blocks.1.layer'" not in message

    def test_a_rest_submodule_that_is_not_there_is_said_once(self, kit):
        plan = OffloadPlan(block_attrs={"dit": ("blocks",)}, rest_submodules={"dit.blocks.0.norm"})
        assert _message(_pipeline(kit, _dit(kit), plan), error=ComponentPathError).count("dit.blocks.0.norm") == 1

    def test_blocks_that_went_away_are_named(self, kit):
        pipeline = _pipeline(kit, _dit(kit), OffloadPlan(block_attrs={"dit": ("blocks",)}))
        component = resolve_offload_plan(pipeline, LAYER).component("dit")
        del pipeline.dit.blocks
        with pytest.raises(ComponentPathError, match=r"'dit\.blocks' leads nowhere"):
            streamed_blocks(pipeline, component)


class TestWeightsOfSeveralComponents:
    """What a streamed block has in common with another component stays with the rest."""

    @staticmethod
    def _resolved(kit, change):
        """Return the plan of two DiTs, after a change of both."""
        dit, other = _dit(kit), _dit(kit)
        change(dit, other)
        plan = OffloadPlan(block_attrs={"dit": ("blocks",)})
        return resolve_offload_plan(_pipeline(kit, dit, plan, other=other), LAYER)

    def test_a_block(self, kit):
        def change(dit, other):
            other.single = dit.blocks[1]

        found = self._resolved(kit, change)
        assert found.component("dit").rest_paths == ("dit.blocks.1",)
        assert found.component("other").rest_paths == ()

    def test_a_part_of_a_block(self, kit):
        def change(dit, other):
            dit.blocks[0].more = kit.Net()
            other.single = dit.blocks[0].more

        assert self._resolved(kit, change).component("dit").rest_paths == ("dit.blocks.0.more",)

    def test_one_weight_beside_others(self, kit):
        def change(dit, other):
            other.single.layer.bias = dit.blocks[1].layer.bias

        assert self._resolved(kit, change).component("dit").rest_paths == ("dit.blocks.1.layer",)

    def test_bytes_of_another_weight(self, kit):
        def change(dit, other):
            other.single.layer.weight = nn.Parameter(dit.blocks[0].layer.weight.detach(), requires_grad=False)

        assert self._resolved(kit, change).component("dit").rest_paths == ("dit.blocks.0.layer",)

    def test_weights_without_an_address(self, kit):
        def change(dit, other):
            for one in (dit, other):
                one.to("meta")
            other.single.layer.bias = dit.blocks[1].layer.bias

        assert self._resolved(kit, change).component("dit").rest_paths == ("dit.blocks.1.layer",)

    def test_nothing_in_common(self, kit):
        assert self._resolved(kit, lambda *_: None).component("dit").rest_paths == ()


class TestStreamedParameters:
    def test_they_are_those_of_the_blocks(self, kit):
        pipeline = _pipeline(kit, _dit(kit), OffloadPlan(block_attrs={"dit": ("blocks",)}))
        assert streamed_parameters(pipeline, LAYER) == set(pipeline.dit.blocks.parameters())
        assert streamed_parameters(pipeline, make_config()) == frozenset()

    def test_what_lives_in_the_rest_is_left_out(self, kit):
        dit = _dit(kit)
        dit.blocks.extend([kit.Net(), kit.Net()])
        dit.blocks[1].layer.weight = dit.blocks[0].layer.weight  # of two blocks
        dit.blocks[2].layer.weight = dit.embed.layer.weight  # of a block and the rest
        plan = OffloadPlan(block_attrs={"dit": ("blocks",)}, rest_submodules={"dit.blocks.3.layer", "dit.nothing.x"})
        pipeline = _pipeline(kit, dit, plan)
        assert resolve_offload_plan(pipeline, LAYER).component("dit").rest_paths == ("dit.blocks.3.layer", "dit.nothing.x")
        assert streamed_parameters(pipeline, LAYER) == {dit.blocks[index].layer.bias for index in range(3)}

    def test_modules_that_blocks_share_are_left_out(self, kit):
        dit = _dit(kit)
        dit.blocks.extend([kit.Net(), kit.Net()])
        dit.blocks[1].layer = dit.blocks[0].layer  # of two blocks
        dit.embed.layer = dit.blocks[2].layer  # of a block and the rest
        pipeline = _pipeline(kit, dit, OffloadPlan(block_attrs={"dit": ("blocks",)}))
        assert streamed_parameters(pipeline, LAYER) == {*dit.blocks[3].parameters()}


def test_only_components_that_stream_have_blocks(kit):
    pipeline = _pipeline(kit, _dit(kit, _layerwise_offload_blocks_attrs=["blocks"]), vae=kit.Net())
    plan = resolve_offload_plan(pipeline, LAYER)
    assert streamed_blocks(pipeline, plan.component("vae")) == ()
    assert [component.path for component in plan.treated(Treatment.STREAM)] == ["dit"]
    assert isinstance(next(iter(streamed_parameters(pipeline, LAYER))), torch.nn.Parameter)
