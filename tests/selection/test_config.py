"""`OffloadConfig`: legacy fields, the selector beside them, and the fields that agree by construction."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import attrs
import pytest

from omni_offload.config import (
    DiffusionParallelConfig,
    DLOTransfer,
    LayerOptions,
    OffloadConfig,
    OffloadPlan,
    OffloadStrategy,
    OmniDiffusionConfig,
    make_config,
    overridden_requests,
)
from omni_offload.errors import OffloadConfigError

AG, RL = DLOTransfer.ALLGATHER, DLOTransfer.RANK_LOCAL
FLAGS = ("enable_distributed_layerwise_offload", "enable_layerwise_offload", "enable_cpu_offload")
STRATEGIES = (OffloadStrategy.DISTRIBUTED_LAYERWISE, OffloadStrategy.LAYERWISE, OffloadStrategy.MODEL_LEVEL)


def _from(**fields):
    return OffloadConfig.from_od_config(OmniDiffusionConfig(**fields))


def _message(call, *args, **fields):
    with pytest.raises(OffloadConfigError) as caught:
        call(*args, **fields)
    return str(caught.value)


def test_the_defaults_are_the_documented_ones():
    config = OffloadConfig(strategy=OffloadStrategy.NONE)
    assert attrs.asdict(config, recurse=False) == {
        "strategy": OffloadStrategy.NONE,
        "pin_cpu_memory": True,
        "use_hsdp": False,
        "dp_size": 1,
        "dlo_use_allgather": True,
        "dlo_resident_layers": 0,
        "dlo_host_registration_limit_gib": 0.0,
        "components": None,
        "dlo_transfers": None,
        "layer_options": {},
        "slots": 3,
        "device_memory": None,
        "host_memory": None,
        "keep_between_calls": False,
        "parallel_config": DiffusionParallelConfig(),
    }
    assert OffloadConfig.from_od_config(OmniDiffusionConfig()) == config


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
def test_several_legacy_booleans_resolve_by_rank(flags):
    od_config = OmniDiffusionConfig(**dict(zip(FLAGS, flags, strict=True)))
    wanted = [index for index, flag in enumerate(flags) if flag]
    strategy = STRATEGIES[wanted[0]] if wanted else OffloadStrategy.NONE
    assert OffloadConfig.from_od_config(od_config).strategy is strategy
    assert overridden_requests(od_config) == tuple(FLAGS[index] for index in wanted[1:])


def test_beside_a_selector_nothing_is_overridden():
    assert overridden_requests(OmniDiffusionConfig(diffusion_offload_config={"mode": "module"}, enable_cpu_offload=True)) == ()


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    "selector",
    [{"mode": "module"}, {"mode": "layer"}, {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}}],
)
def test_a_legacy_boolean_that_disagrees_with_the_selector_is_an_error(flag, selector):
    strategy = make_config(selector).strategy
    fields = {"diffusion_offload_config": selector, flag: True}
    if STRATEGIES[FLAGS.index(flag)] is strategy:
        assert _from(**fields).strategy is strategy
    else:
        message = _message(_from, **fields)
        assert flag in message
        assert strategy.value in message


@pytest.mark.parametrize(
    ("selected", "legacy", "pinned"),
    [(None, True, True), (None, False, False), (True, True, True), (False, True, False), (False, False, False)],
)
def test_pin_memory_left_out_takes_pin_cpu_memory(selected, legacy, pinned):
    selector = {"mode": "module"} | ({} if selected is None else {"pin_memory": selected})
    assert _from(diffusion_offload_config=selector, pin_cpu_memory=legacy).pin_cpu_memory is pinned


def test_pin_memory_against_a_given_pin_cpu_memory_is_an_error():
    fields = {"diffusion_offload_config": {"mode": "module", "pin_memory": True}, "pin_cpu_memory": False}
    assert "pin_cpu_memory" in _message(_from, **fields)


class TestResidentLayers:
    @pytest.mark.parametrize("flag", FLAGS[:2])
    @pytest.mark.parametrize("number", [0, 3])
    def test_the_legacy_number_is_always_a_number(self, flag, number):
        config = _from(**{flag: True, "dlo_resident_layers": number})
        assert config.dlo_resident_layers == config.options_for("dit").resident_layers == number

    def test_at_model_level_it_says_nothing(self):
        config = _from(enable_cpu_offload=True, dlo_resident_layers=3)
        assert (config.dlo_resident_layers, config.layer_options) == (3, {})

    @pytest.mark.parametrize("number", [None, 0, 3])
    def test_the_selector_fills_in_the_old_number(self, number):
        config = make_config("layer", layer_options={"dit": {"resident_layers": number}})
        assert config.options_for("dit").resident_layers == number
        assert config.dlo_resident_layers == (number or 0)

    @pytest.mark.parametrize("number", [None, 0, 2])
    def test_a_given_legacy_number_that_differs_is_an_error(self, number):
        selector = {"mode": "layer", "layer_options": {"dit": {"resident_layers": number}}}
        assert "dlo_resident_layers is 3" in _message(_from, diffusion_offload_config=selector, dlo_resident_layers=3)

    def test_a_given_legacy_number_that_agrees_is_none(self):
        selector = {"mode": "layer", "layer_options": {"dit": {"resident_layers": 3}}}
        assert _from(diffusion_offload_config=selector, dlo_resident_layers=3).dlo_resident_layers == 3

    def test_built_by_hand_the_old_number_fills_in_the_new(self):
        config = OffloadConfig(strategy="layerwise", dlo_resident_layers=2)
        assert config.layer_options == {"dit": LayerOptions(resident_layers=2)}

    def test_built_by_hand_two_numbers_are_an_error(self):
        options = {"dit": LayerOptions(resident_layers=1)}
        text = _message(OffloadConfig, strategy="layerwise", dlo_resident_layers=2, layer_options=options)
        assert "dlo_resident_layers is 2" in text

    def test_built_by_hand_a_number_for_an_unselected_dit_is_an_error(self):
        text = _message(OffloadConfig, strategy="layerwise", dlo_resident_layers=2, components=["vae"])
        assert "components leaves dit out" in text


class TestTransfers:
    @pytest.mark.parametrize(("gather", "transfer"), [(True, AG), (False, RL)])
    def test_without_a_selector_every_component_takes_the_legacy_choice(self, gather, transfer):
        config = _from(enable_distributed_layerwise_offload=True, dlo_use_allgather=gather)
        assert config.dlo_transfers is None
        assert [config.transfer_for(name) for name in ("dit", "text_encoder", "vae", "other")] == [transfer] * 4
        assert config.uses_allgather("dit") is gather

    @pytest.mark.parametrize("gather", [True, False])
    @pytest.mark.parametrize("components", [None, ["dit", "text_encoder"], ["text_encoder"]])
    @pytest.mark.parametrize("dit", [None, "allgather", "rank-local"])
    @pytest.mark.parametrize("text", [None, "allgather", "rank-local"])
    def test_given_ones_stand_and_the_others_take_the_legacy_choice(self, gather, components, dit, text):
        given = {"dit": dit, "text_encoder": text}
        chosen = {name: {"weight_transfer": value} for name, value in given.items() if value and name in (components or given)}
        if not chosen:
            return
        selector = {"mode": "layer", "layer_options": chosen} | ({"components": components} if components else {})
        fields = {"diffusion_offload_config": selector, "dlo_use_allgather": gather}
        kinds = components or ["dit", "text_encoder", "vae"]
        given_gathers = {name for name, value in chosen.items() if value["weight_transfer"] == "allgather"}
        if not gather and given_gathers and ("dit" in given_gathers or set(chosen) == set(kinds)):
            assert "dlo_use_allgather is False" in _message(_from, **fields)
            return
        config = _from(**fields)
        for kind in kinds:
            expected = DLOTransfer(chosen[kind]["weight_transfer"]) if kind in chosen else (AG if gather else RL)
            assert config.transfer_for(kind) is expected, kind
        assert config.dlo_use_allgather is config.uses_allgather("dit")
        for name, value in chosen.items():
            assert config.dlo_transfers[name] is config.layer_options[name].weight_transfer is DLOTransfer(value["weight_transfer"])

    def test_built_by_hand_old_and_new_agree_or_fail(self):
        options = {"dit": LayerOptions(weight_transfer=RL)}
        config = OffloadConfig(strategy="distributed_layerwise", dlo_transfers={"dit": "rank-local"}, layer_options=options)
        assert config.transfer_for("dit") is RL
        text = _message(OffloadConfig, strategy="distributed_layerwise", dlo_transfers={"dit": AG}, layer_options=options)
        assert "drop one" in text
        text = _message(OffloadConfig, strategy="distributed_layerwise", dlo_transfers={"dit": AG}, dlo_use_allgather=False)
        assert "dlo_use_allgather is False" in text

    @pytest.mark.parametrize(
        ("value", "hint"), [(3, "mapping"), ({"dot": AG}, "did you mean 'dit'"), ({"dit": "x"}, "dlo_transfers.dit is 'x'")]
    )
    def test_transfers_of_another_type_are_an_error(self, value, hint):
        assert hint in _message(OffloadConfig, strategy="distributed_layerwise", dlo_transfers=value)

    def test_a_transfer_in_a_strategy_that_is_not_distributed_is_an_error(self):
        options = {"dit": LayerOptions(weight_transfer=RL)}
        assert "not distributed" in _message(OffloadConfig, strategy="layerwise", layer_options=options)

    @pytest.mark.parametrize("transfer", [None, "allgather", "rank-local"])
    def test_a_checkpoint_backs_rank_local_blocks_only(self, transfer):
        options = {"dit": {"checkpoint": "file", "weight_transfer": transfer}}
        if transfer == "rank-local":
            assert make_config("layer", layer_options=options).options_for("dit").checkpoint.name == "file"
        else:
            assert "checkpoint backs rank-local" in _message(make_config, "layer", layer_options=options)

    def test_a_checkpoint_may_stand_where_the_legacy_choice_is_rank_local(self):
        options = {"dit": {"weight_transfer": "rank-local"}, "text_encoder": {"checkpoint": "file"}}
        fields = {"diffusion_offload_config": {"mode": "layer", "layer_options": options}}
        assert _from(**fields, dlo_use_allgather=False).transfer_for("text_encoder") is RL
        assert "layer_options.text_encoder.checkpoint" in _message(_from, **fields)

    def test_options_with_a_strategy_that_streams_nothing_are_an_error(self):
        assert "streams nothing" in _message(OffloadConfig, strategy="model_level", layer_options={"dit": LayerOptions()})


class TestParallel:
    @pytest.mark.parametrize(
        ("fields", "size"),
        [
            ({}, 1),
            ({"data_parallel_size": 4}, 4),
            ({"sequence_parallel_size": 3}, 3),
            ({"data_parallel_size": 2, "sequence_parallel_size": 3}, 2),
            ({"tensor_parallel_size": 2}, 1),
            ({"use_hsdp": True, "hsdp_shard_size": 2, "hsdp_replicate_size": 3}, 6),
            ({"use_hsdp": True, "hsdp_shard_size": 2, "data_parallel_size": 8}, 2),
            ({"use_hsdp": True, "data_parallel_size": 8}, 8),
            ({"hsdp_shard_size": 2, "hsdp_replicate_size": 3}, 1),
        ],
    )
    def test_dp_size_is_derived(self, fields, size):
        config = _from(enable_distributed_layerwise_offload=True, parallel_config=DiffusionParallelConfig(**fields))
        assert config.dp_size == size
        assert config.use_hsdp is fields.get("use_hsdp", False)
        assert attrs.evolve(config, slots=4).dp_size == size

    @pytest.mark.parametrize("axis", ["sequence_parallel_size", "tensor_parallel_size"])
    def test_hsdp_with_sp_or_tp_is_an_error(self, axis):
        parallel = DiffusionParallelConfig(use_hsdp=True, **{axis: 2})
        assert f"use_hsdp with {axis}=2" in _message(_from, parallel_config=parallel)
        assert axis in _message(OffloadConfig, strategy="layerwise", parallel_config=parallel)

    def test_built_by_hand_old_numbers_fill_in_the_parallel_config(self):
        config = OffloadConfig(strategy="distributed_layerwise", use_hsdp=True, dp_size=4)
        assert config.parallel_config == DiffusionParallelConfig(use_hsdp=True, hsdp_shard_size=4)
        config = OffloadConfig(strategy="distributed_layerwise", dp_size=4)
        assert config.parallel_config == DiffusionParallelConfig(data_parallel_size=4)

    def test_built_by_hand_numbers_that_disagree_are_an_error(self):
        text = _message(
            OffloadConfig,
            strategy="layerwise",
            use_hsdp=True,
            dp_size=3,
            parallel_config=DiffusionParallelConfig(data_parallel_size=2),
        )
        assert "use_hsdp is True" in text
        assert "dp_size is 3" in text


class TestEngines:
    def test_any_object_with_the_attributes_works_and_a_missing_one_takes_its_default(self):
        other = SimpleNamespace(enable_layerwise_offload=True, parallel_config=SimpleNamespace(data_parallel_size=2), unrelated=1)
        config = OffloadConfig.from_od_config(other)
        assert (config.strategy, config.dp_size, config.pin_cpu_memory) == (OffloadStrategy.LAYERWISE, 2, True)
        assert make_config(other) == config
        assert OffloadConfig.from_od_config(object()).strategy is OffloadStrategy.NONE

    def test_none_counts_as_missing(self):
        names = [field.name for field in attrs.fields(OmniDiffusionConfig)]
        other = SimpleNamespace(**dict.fromkeys(names))
        assert OffloadConfig.from_od_config(other) == OffloadConfig(strategy="none")

    def test_a_mapping_is_no_engine_config(self):
        assert "diffusion_offload_config" in _message(OffloadConfig.from_od_config, {"mode": "module"})

    def test_one_error_names_every_problem(self):
        other = SimpleNamespace(
            diffusion_offload_config={"mode": "layer", "slot": 2},
            enable_cpu_offload="yes",
            pin_cpu_memory=1,
            dlo_use_allgather=0,
            dlo_resident_layers=True,
            dlo_host_registration_limit_gib=-1.0,
            parallel_config=SimpleNamespace(use_hsdp=1, data_parallel_size=0, hsdp_shard_size=0),
        )
        message = _message(OffloadConfig.from_od_config, other)
        for name in (
            *("'slot'", "enable_cpu_offload", "pin_cpu_memory", "dlo_use_allgather", "dlo_resident_layers is True"),
            *("dlo_host_registration_limit_gib", "use_hsdp is 1", "data_parallel_size is 0", "hsdp_shard_size"),
        ):
            assert name in message

    @pytest.mark.parametrize("limit", [True, "1", float("nan"), -0.5])
    def test_a_limit_is_a_number_of_gib(self, limit):
        other = SimpleNamespace(dlo_host_registration_limit_gib=limit)
        assert "GiB" in _message(OffloadConfig.from_od_config, other)

    def test_a_limit_may_be_an_int(self):
        assert _from(dlo_host_registration_limit_gib=2).dlo_host_registration_limit_gib == 2.0

    @pytest.mark.parametrize("value", [3, "parallel", object()])
    def test_a_parallel_config_of_another_type_is_an_error(self, value):
        assert "parallel_config is" in _message(OffloadConfig.from_od_config, SimpleNamespace(parallel_config=value))

    def test_the_engine_config_checks_its_own_fields(self):
        text = _message(OmniDiffusionConfig, diffusion_offload_config="module", pin_cpu_memory="no", parallel_config=3)
        for name in ("diffusion_offload_config", "pin_cpu_memory", "parallel_config"):
            assert name in text


class TestWhoIsSelected:
    PLAN = OffloadPlan(encoder_component_types={"mllm": "text_encoder"})

    @pytest.mark.parametrize(
        ("components", "offloads", "encoder", "should"),
        [
            (None, ["dit"], [], ["text_encoder", "a.text_encoder_2", "my_text_encoder", "mllm", "image_encoder"]),
            (["dit"], ["dit"], [], []),
            (["vae", "dit"], ["dit", "vae"], [], []),
            (
                ["text_encoder"],
                ["text_encoder"],
                ["text_encoder", "a.text_encoder_2", "my_text_encoder", "mllm"],
                ["text_encoder", "a.text_encoder_2", "my_text_encoder", "mllm"],
            ),
        ],
    )
    def test_the_table(self, components, offloads, encoder, should):
        config = OffloadConfig(strategy="model_level", components=components)
        names = ["text_encoder", "a.text_encoder_2", "my_text_encoder", "mllm", "image_encoder"]
        assert [name for name in ("dit", "text_encoder", "vae") if config.offloads(name)] == offloads
        assert [name for name in names if config.offloads_encoder(name, self.PLAN)] == encoder
        assert [name for name in names if config.should_offload_encoder(name, self.PLAN)] == should

    def test_without_a_plan_the_name_decides(self):
        config = OffloadConfig(strategy="model_level", components=["text_encoder"])
        assert not config.offloads_encoder("mllm")
        assert config.offloads_encoder("pipe.text_encoder")
        assert not config.should_offload_encoder("text_encoder.inner")


class TestAsAValue:
    CONFIG = make_config(
        "layer",
        components=["dit", "text_encoder"],
        layer_options={"dit": {"weight_transfer": "rank-local", "checkpoint": "a/b", "resident_layers": 2}},
        device_memory="2GiB",
    )

    def test_it_is_frozen_hashable_and_can_be_copied(self):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            self.CONFIG.slots = 4
        assert hash(self.CONFIG) == hash(copy.deepcopy(self.CONFIG))
        assert pickle.loads(pickle.dumps(self.CONFIG)) == copy.deepcopy(self.CONFIG) == self.CONFIG

    def test_resolving_again_changes_nothing(self):
        assert attrs.evolve(self.CONFIG) == self.CONFIG
        assert attrs.evolve(self.CONFIG, slots=4).dlo_transfers == self.CONFIG.dlo_transfers

    def test_it_is_built_from_plain_values(self):
        fields = {"strategy": "layerwise", "components": ["dit"], "parallel_config": {"data_parallel_size": 2}}
        assert OffloadConfig.from_fields(fields).dp_size == 2
        assert OffloadConfig.from_fields({"strategy": "none"}) == OffloadConfig(strategy=OffloadStrategy.NONE)

    def test_options_of_a_component_without_any_are_the_defaults(self):
        assert self.CONFIG.options_for("vae") == LayerOptions()

    def test_the_selector_is_not_kept(self):
        options = {"dit": {"resident_layers": 2}}
        config = make_config("layer", layer_options=options)
        options["dit"]["resident_layers"] = 5
        assert config.dlo_resident_layers == 2

    @pytest.mark.parametrize(
        ("fields", "hint"),
        [
            ({"strategy": "fast"}, "strategy is 'fast'"),
            ({"strategy": None}, "strategy"),
            ({"slots": 1}, "slots is 1"),
            ({"dp_size": 0}, "dp_size is 0"),
            ({"use_hsdp": "x"}, "use_hsdp"),
            ({"keep_between_calls": 3}, "keep_between_calls"),
            ({"device_memory": 0}, "device_memory"),
            ({"host_memory": "x"}, "host_memory"),
            ({"components": []}, "components"),
            ({"layer_options": 3}, "layer_options"),
        ],
    )
    def test_every_field_is_checked(self, fields, hint):
        assert hint in _message(OffloadConfig, **{"strategy": "layerwise", **fields})
