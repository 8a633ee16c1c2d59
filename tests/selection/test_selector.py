"""The selector: every key, every way to be wrong, and all problems in one error."""

from pathlib import Path

import pytest

from omni_offload.config import (
    DLOTransfer,
    LayerOptions,
    OffloadConfig,
    OffloadMode,
    OffloadStrategy,
    OmniDiffusionConfig,
    ResidentPlacement,
    make_config,
    parse_selector,
)
from omni_offload.errors import OffloadConfigError


def _message(selector):
    with pytest.raises(OffloadConfigError) as caught:
        parse_selector(selector)
    return str(caught.value)


def test_defaults_are_those_of_the_documentation():
    selector = parse_selector({"mode": "module"})
    assert selector.mode is OffloadMode.MODULE
    assert (selector.components, selector.layer_options, selector.pin_memory) == (None, {}, None)
    assert (selector.slots, selector.keep_between_calls) == (3, False)
    assert (selector.device_memory, selector.host_memory) == (None, None)


def test_every_key_is_read():
    selector = parse_selector(
        {
            "mode": OffloadMode.LAYER,
            "components": ["dit", "text_encoder"],
            "layer_options": {
                "dit": {
                    "weight_transfer": "rank-local",
                    "resident_layers": 4,
                    "resident_placement": "leading",
                    "checkpoint": "weights.safetensors",
                },
                "text_encoder": LayerOptions(weight_transfer=DLOTransfer.ALLGATHER),
            },
            "pin_memory": False,
            "slots": 2,
            "keep_between_calls": True,
            "device_memory": "12GiB",
            "host_memory": 0,
        }
    )
    assert selector.components == {"dit", "text_encoder"}
    assert selector.layer_options["dit"] == LayerOptions(
        weight_transfer=DLOTransfer.RANK_LOCAL,
        resident_layers=4,
        resident_placement=ResidentPlacement.LEADING,
        checkpoint=Path("weights.safetensors"),
    )
    assert selector.layer_options["text_encoder"].weight_transfer is DLOTransfer.ALLGATHER
    assert (selector.pin_memory, selector.slots, selector.keep_between_calls) == (False, 2, True)
    assert (selector.device_memory, selector.host_memory) == (12 * 2**30, 0)


@pytest.mark.parametrize(
    ("selector", "strategy"),
    [
        ({"mode": "module"}, OffloadStrategy.MODEL_LEVEL),
        ({"mode": "layer"}, OffloadStrategy.LAYERWISE),
        ({"mode": "layer", "layer_options": {"dit": {"resident_layers": 2}}}, OffloadStrategy.LAYERWISE),
        ({"mode": "layer", "layer_options": {"dit": {"weight_transfer": "rank-local"}}}, OffloadStrategy.DISTRIBUTED_LAYERWISE),
        ({"mode": "layer", "layer_options": {"vae": {"weight_transfer": "allgather"}}}, OffloadStrategy.DISTRIBUTED_LAYERWISE),
    ],
)
def test_the_mode_and_any_weight_transfer_make_the_strategy(selector, strategy):
    assert parse_selector(selector).strategy is strategy
    assert make_config(selector).strategy is strategy


def test_a_key_that_is_none_counts_as_left_out():
    keys = ("components", "layer_options", "pin_memory", "slots", "keep_between_calls", "device_memory", "host_memory")
    assert parse_selector({"mode": "layer", **dict.fromkeys(keys)}) == parse_selector({"mode": "layer"})


def test_without_components_options_may_name_any_component():
    options = {name: {"resident_layers": 1} for name in ("dit", "text_encoder", "vae")}
    assert set(parse_selector({"mode": "layer", "layer_options": options}).layer_options) == set(options)


@pytest.mark.parametrize("value", [["dit"], ("dit",), {"dit"}, frozenset({"dit"})])
def test_components_may_be_any_plain_collection(value):
    assert parse_selector({"mode": "module", "components": value}).components == {"dit"}


@pytest.mark.parametrize(
    ("key", "value", "hints"),
    [
        ("mode", "modul", ["'modul'", "did you mean 'module'?"]),
        ("mode", 3, ["mode is 3", "auto, layer, module"]),
        ("mode", None, ["mode is missing"]),
        ("components", "dit", ["['dit']"]),
        ("components", "all", ["'all'", "non-empty list"]),
        ("components", [], ["non-empty list"]),
        ("components", {}, ["non-empty list"]),
        ("components", ["ditt"], ["'ditt'", "did you mean 'dit'?"]),
        ("components", ["dit", "dit"], ["'dit' 2 times"]),
        ("components", ["dit", 3], ["holds 3", "strings"]),
        ("components", [["dit"]], ["holds ['dit']"]),
        ("layer_options", [], ["layer_options is []", "mapping"]),
        ("layer_options", {"unet": {}}, ["'unet'", "dit, text_encoder, vae"]),
        ("layer_options", {3: {}}, ["names 3"]),
        ("layer_options", {"dit": 3}, ["layer_options.dit is 3", "weight_transfer"]),
        ("layer_options", {"dit": {"resident_layer": 3}}, ["'resident_layer'", "did you mean 'resident_layers'?"]),
        ("layer_options", {"dit": {"weight_transfer": "gather"}}, ["layer_options.dit.weight_transfer", "'gather'"]),
        ("layer_options", {"dit": {"resident_layers": -1}}, ["resident_layers is -1", ">= 0"]),
        ("layer_options", {"dit": {"resident_layers": True}}, ["resident_layers is True", "int"]),
        ("layer_options", {"dit": {"resident_layers": 1.0}}, ["resident_layers is 1.0", "int"]),
        ("layer_options", {"dit": {"resident_placement": "last"}}, ["'last'", "leading, spread"]),
        ("layer_options", {"dit": {"checkpoint": 3}}, ["checkpoint is 3", "path"]),
        ("layer_options", {"dit": {"checkpoint": ""}}, ["checkpoint is ''", "path"]),
        ("pin_memory", 1, ["pin_memory is 1", "True or False"]),
        ("slots", 1, ["slots is 1", ">= 2"]),
        ("slots", True, ["slots is True", "int"]),
        ("slots", "3", ["slots is '3'", "int"]),
        ("keep_between_calls", "yes", ["keep_between_calls is 'yes'"]),
        ("device_memory", 0, ["device_memory is 0", "at least 1"]),
        ("device_memory", "12", ["device_memory", "'12'", "GiB"]),
        ("device_memory", True, ["device_memory", "True"]),
        ("host_memory", -5, ["host_memory", "-5"]),
        ("host_memory", 1.5, ["host_memory", "1.5"]),
        ("slot", 3, ["unknown key 'slot'", "did you mean 'slots'?"]),
        (7, 3, ["unknown key 7"]),
    ],
)
def test_each_wrong_value_is_named_with_what_to_do(key, value, hints):
    message = _message({"mode": "layer", key: value})
    for hint in hints:
        assert hint in message


def test_options_for_an_unselected_component_are_an_error():
    message = _message({"mode": "layer", "components": ["dit"], "layer_options": {"vae": {"resident_layers": 1}}})
    assert "'vae'" in message
    assert "components leaves out" in message


def test_layer_options_with_mode_module_are_an_error():
    assert "mode 'module'" in _message({"mode": "module", "layer_options": {"dit": {}}})


def test_one_error_names_every_problem():
    message = _message(
        {
            "mod": "layer",
            "slots": 1,
            "components": ["ditt"],
            "layer_options": {"dit": {"x": 1, "resident_layers": -1}},
            "device_memory": "x",
        }
    )
    for hint in ("'mod'", "mode is missing", "slots is 1", "'ditt'", "'x'", "resident_layers is -1", "device_memory"):
        assert hint in message


@pytest.mark.parametrize("value", [3, ["mode"], "layer"])
def test_a_selector_is_a_mapping(value):
    assert "mapping" in _message(value)


def test_auto_is_not_implemented_yet():
    with pytest.raises(NotImplementedError, match="planner"):
        parse_selector({"mode": "auto"})
    with pytest.raises(NotImplementedError):
        make_config("auto")


def test_what_is_wrong_beside_auto_is_said_first():
    assert "slots" in _message({"mode": "auto", "slots": 1})


def test_an_empty_selector_is_not_no_selector():
    with pytest.raises(OffloadConfigError, match="mode is missing"):
        OffloadConfig.from_od_config(OmniDiffusionConfig(diffusion_offload_config={}))


def test_layer_options_are_checked_where_they_are_built():
    with pytest.raises(OffloadConfigError) as caught:
        LayerOptions(weight_transfer="gather", resident_layers=True, resident_placement=3, checkpoint=1)
    for name in ("weight_transfer", "resident_layers", "resident_placement", "checkpoint"):
        assert name in str(caught.value)
    built = LayerOptions(weight_transfer="allgather", resident_placement="leading", checkpoint="a")
    assert built == LayerOptions(weight_transfer=DLOTransfer.ALLGATHER, resident_placement=ResidentPlacement.LEADING, checkpoint=Path("a"))


class TestMakeConfig:
    def test_none_is_mode_module(self):
        assert make_config() == make_config("module") == make_config({"mode": "module"})
        assert make_config().strategy is OffloadStrategy.MODEL_LEVEL

    @pytest.mark.parametrize("config", [None, "layer", {"mode": "layer"}])
    def test_keys_merge_with_none_a_mode_and_a_selector(self, config):
        keys = {"slots": 2, "device_memory": "1GiB"} | ({"mode": "layer"} if config is None else {})
        built = make_config(config, **keys)
        assert (built.strategy, built.slots, built.device_memory) == (OffloadStrategy.LAYERWISE, 2, 2**30)

    @pytest.mark.parametrize(("config", "keys"), [("layer", {"mode": "layer"}), ({"mode": "layer", "slots": 2}, {"slots": 2})])
    def test_a_key_given_twice_is_an_error(self, config, keys):
        with pytest.raises(OffloadConfigError, match="twice"):
            make_config(config, **keys)

    @pytest.mark.parametrize("config", [OffloadConfig(strategy=OffloadStrategy.LAYERWISE), OmniDiffusionConfig(enable_cpu_offload=True)])
    def test_keys_beside_another_config_are_an_error(self, config):
        with pytest.raises(OffloadConfigError, match=f"slots stand beside a {type(config).__name__}"):
            make_config(config, slots=2)

    def test_a_config_passes_unchanged(self):
        config = OffloadConfig(strategy=OffloadStrategy.LAYERWISE)
        assert make_config(config) is config

    def test_an_engine_config_is_resolved(self):
        assert make_config(OmniDiffusionConfig(enable_layerwise_offload=True)).strategy is OffloadStrategy.LAYERWISE

    @pytest.mark.parametrize("config", [OffloadConfig(strategy=OffloadStrategy.NONE), OmniDiffusionConfig()])
    def test_a_config_that_resolves_to_none_is_an_error(self, config):
        with pytest.raises(OffloadConfigError, match="NONE"):
            make_config(config)

    @pytest.mark.parametrize("config", [3, ["module"], object()])
    def test_anything_else_is_an_error(self, config):
        with pytest.raises(OffloadConfigError, match="config is"):
            make_config(config)

    def test_an_unknown_key_is_an_error(self):
        with pytest.raises(OffloadConfigError, match="did you mean 'slots'"):
            make_config(slot=3)
