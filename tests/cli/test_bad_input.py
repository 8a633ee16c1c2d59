"""Every bad input ends with status 2, one line on standard error and nothing on standard output."""

import importlib.util
import shutil

import pytest

import pipelines
from omni_offload.testing import sim
from pipelines import PipelineEntry


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing command"),
        (["runn"], "runn"),
        (["run"], "Missing argument"),
        (["run", "digits", "--stepz", "3"], "--stepz"),
        (["run", "digits", "--steps", "0"], "--steps"),
        (["run", "digits", "--steps", "many"], "--steps"),
        (["run", "digits", "--seed", "-1"], "--seed"),
        (["run", "digits", "--prompt"], "--prompt"),
    ],
)
def test_usage(refused, arguments, says):
    assert says in refused(*arguments)


def test_an_unknown_pipeline_is_answered_with_the_nearest_name(refused):
    assert "did you mean 'digits'?" in refused("run", "digitz")


def test_a_folder_without_a_pipeline_is_named(refused, tmp_path):
    assert "model_index.json" in refused("run", str(tmp_path), "--prompt", "a cat")


def test_a_folder_that_is_missing_is_named(refused):
    assert "no local folder" in refused("run", "./missing", "--prompt", "a cat")


def test_a_folder_with_missing_weights_is_named(refused, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}')
    assert "does not load" in refused("run", str(tmp_path), "--prompt", "a cat")


@pytest.mark.parametrize("target", ["x" * 5000, "./" + "x" * 300, "./" + "x/" * 3000], ids=["name", "part", "path"])
@pytest.mark.parametrize("command", ["run", "check", "audit"])
def test_a_name_that_no_file_can_have(refused, command, target):
    assert target.removeprefix("./")[:300] in refused(command, target)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("scheduler/scheduler_config.json", '{"num_train_timesteps": "many"}'),
        ("tokenizer/tokenizer.json", "[]"),
        ("text_encoder/config.json", "[]"),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", "{}"),
        ("transformer/diffusion_pytorch_model.safetensors", '\x14\0\0\0\0\0\0\0{"a":{"dtype":"F32"}}'),
    ],
    ids=["scheduler", "tokenizer", "encoder", "shards", "weights"],
)
def test_a_folder_with_another_content_is_named(refused, tmp_path, file, content):
    """However diffusers and transformers fail on it."""
    from pipelines.digits.cases import CHECKPOINT

    folder = shutil.copytree(CHECKPOINT, tmp_path / "model")
    (folder / file).write_text(content)
    assert f"{folder} does not load" in refused("run", str(folder), "--prompt", "seven")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        (" \t ", "empty"),
        ("\udcff", "not text"),
        ("a\x07b", "not text"),
        ("a red cat", "it knows zero, one"),
        ("sevn", "did you mean 'seven'?"),
        ("7", "did you mean 'seven'?"),
    ],
)
def test_a_prompt_that_cannot_be_used(refused, prompt, says):
    assert says in refused("run", "digits", "--prompt", prompt)


def test_a_folder_needs_a_prompt(refused):
    from pipelines.digits.cases import CHECKPOINT

    assert "give one with --prompt" in refused("run", str(CHECKPOINT))


def test_an_option_that_the_pipeline_does_not_take(refused, monkeypatch):
    entry = PipelineEntry("silent", pipeline="pipelines.flux.pipeline_flux:OmniFluxPipeline", cases=("pipelines.flux.cases:FLUX",))
    monkeypatch.setattr(pipelines, "registered", lambda: {"silent": entry})
    from pipelines.flux.pipeline_flux import OmniFluxPipeline

    monkeypatch.setattr(OmniFluxPipeline, "__call__", lambda _self: None)
    assert "takes no prompt" in refused("run", "silent", "--prompt", "a cat")


def test_an_entry_without_a_case(refused, monkeypatch):
    entry = PipelineEntry("bare", pipeline="pipelines.flux.pipeline_flux:OmniFluxPipeline")
    monkeypatch.setattr(pipelines, "registered", lambda: {"bare": entry})
    assert "no offline case" in refused("run", "bare")


@pytest.mark.parametrize("option", ["--capacity", "--device-memory"])
@pytest.mark.parametrize("size", ["", "12", "twelve", "1.5 furlongs", "-1", "0"])
def test_sizes(refused, option, size):
    message = refused("run", "digits", "--device", "sim", option, size)
    assert option in message or "device_memory" in message or size == "12"


def test_a_capacity_that_does_not_hold_the_largest_component(refused):
    message = refused("run", "digits", "--prompt", "seven", "--capacity", "1MiB")
    assert "too small" in message
    assert "transformer" in message


def test_a_capacity_that_does_not_hold_the_activations_names_one_that_does(refused, cli):
    message = refused("run", "digits", "--prompt", "seven", "--capacity", "2350000")
    enough = message.rpartition("--capacity ")[2].split()[0]
    status, _, err = cli("run", "digits", "--prompt", "seven", "--capacity", enough)
    assert status == 0, err


def test_a_budget_that_does_not_hold_the_largest_component(refused):
    assert "transformer" in refused("run", "digits", "--prompt", "seven", "--device-memory", "1MiB")


def test_a_budget_that_does_not_hold_the_slots_is_not_answered_with_the_mode_that_was_asked_for(refused):
    assert refused("run", "digits", "--mode", "layer", "--device-memory", "300KiB").endswith("or use fewer slots\n")
    assert refused("run", "digits", "--device-memory", "300KiB").endswith("or use mode 'layer'\n")


def test_a_capacity_in_layer_mode_is_for_the_slots(refused):
    assert "transformer has 1951040 bytes" in refused("run", "digits", "--mode", "layer", "--capacity", "1MiB")


def test_a_capacity_is_only_for_the_simulated_device(refused):
    assert "--capacity" in refused("run", "digits", "--device", "cpu", "--capacity", "1GiB")


@pytest.mark.parametrize("device", ["gpu", "cuda", "xpu:3", "sim:9", "sim:x", "meta", ""])
def test_devices(refused, device):
    assert "--device" in refused("run", "digits", "--device", device)


def test_the_simulated_device_is_refused_where_it_cannot_be(refused, monkeypatch):
    monkeypatch.setattr(sim, "why_unavailable", lambda: "there is no compiler")
    assert "there is no compiler" in refused("run", "digits", "--device", "sim")


@pytest.mark.parametrize(("mode", "says"), [("laier", "did you mean 'layer'?"), ("auto", "")])
def test_modes(refused, mode, says):
    assert says in refused("run", "digits", "--prompt", "seven", "--mode", mode)


def test_an_output_in_a_folder_that_is_missing(refused):
    assert "cannot be written" in refused("run", "digits", "--output", "missing/picture.png")


def test_an_output_that_is_a_folder(refused, tmp_path):
    (tmp_path / "a.png").mkdir()
    assert "is a folder" in refused("run", "digits", "--output", "a.png")


def test_an_output_that_is_no_png(refused):
    assert ".png" in refused("run", "digits", "--output", "picture.jpg")


def test_an_output_below_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused("run", "digits", "--output", "file/picture.png")


def test_an_output_that_fails_at_the_end(refused, monkeypatch):
    from PIL import Image

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert "No space left" in refused("run", "digits", "--device", "cpu", "--prompt", "seven")


def test_an_input_that_the_pipeline_refuses(refused, monkeypatch):
    from pipelines.flux.pipeline_flux import OmniFluxPipeline

    def check(self, *args, **kwargs):
        raise ValueError("no picture\nof that size")

    monkeypatch.setattr(OmniFluxPipeline, "check_inputs", check)
    assert "no picture of that size" in refused("run", "digits", "--device", "cpu", "--prompt", "seven")


def test_the_extra_of_the_command_line_is_named_where_it_is_missing(refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else find(name, *rest))
    message = refused("pipelines")
    assert "rich" in message
    assert "omni-offload[cli]" in message


def test_the_extra_of_the_pipelines_is_named_where_it_is_missing(refused, monkeypatch):
    def load_cases(self):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(PipelineEntry, "load_cases", load_cases)
    message = refused("run", "digits")
    assert "transformers" in message
    assert "omni-offload[pipelines]" in message


def test_an_interrupt_has_the_shell_status(cli, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(pipelines, "registered", interrupt)
    status, out, _ = cli("pipelines")
    assert (status, out) == (130, "")


def test_an_error_of_the_program_keeps_its_traceback(cli, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(pipelines, "registered", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli("pipelines")
