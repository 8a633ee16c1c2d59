"""`omni-offload run` makes the picture, tells what was moved, and whether it equals a resident run."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image
from rich.console import Console

from omni_offload.cli import places, run
from omni_offload.cli.places import Kind, Place
from omni_offload.cli.progress import shown_progress, shown_wait
from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch):
    """As on a machine without an accelerator, also where there is one."""
    monkeypatch.setattr(places, "find_accelerator", lambda: None)


@pytest.fixture
def as_accelerator(monkeypatch):
    """Let the simulated device pass for a real one."""
    place = Place(device=sim.install(), kind=Kind.ACCELERATOR)
    monkeypatch.setattr(run, "choose_place", lambda _asked: place)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _device: (1 << 30, 1 << 30))
    return place


def test_the_picture_equals_a_resident_run_on_a_device_smaller_than_the_weights(run_json, tmp_path):
    told = run_json("run", "digits", "--prompt", "seven")
    assert told["equal_to_resident_run"] is True
    assert told["races"] == 0
    assert told["device_kind"] == "simulated"
    assert told["peak_bytes"] <= told["capacity_bytes"] < told["weight_bytes"] < told["resident_run_peak_bytes"]
    assert {c["name"]: c["loads"] for c in told["components"]} == dict.fromkeys(("text_encoder", "text_encoder_2", "transformer", "vae"), 1)
    assert all(c["bytes_out"] == c["resident_bytes"] == 0 for c in told["components"])
    with Image.open(tmp_path / told["output"]) as picture:
        assert picture.size == (256, 256)


def test_the_picture_shows_the_prompt(run_json, tmp_path):
    pytest.importorskip("sklearn")
    from pipelines.digits.judge import judge

    told = run_json("run", "digits", "--prompt", "seven")
    with Image.open(tmp_path / told["output"]) as picture:
        small = picture.resize((8, 8), Image.Resampling.BOX)
        values = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(1, 8, 8, 3).permute(0, 3, 1, 2) / 255
    assert judge(values).item() == 7


def test_the_table_says_what_a_person_wants_to_know(cli):
    status, out, err = cli("run", "digits", "--prompt", "seven", "--output", "seven.png")
    assert (status, err) == (0, "")
    for part in ("transformer", "moved in", "loads", "capacity", "peak", "equal to a resident run: yes", "picture: seven.png", "total"):
        assert part in out
    assert "less than the 2.8 MiB of weights" in out


def test_without_a_prompt_the_case_has_its_own(run_json, tmp_path):
    told = run_json("run", "digits")
    assert told["prompt"] is None
    with Image.open(tmp_path / told["output"]) as picture:
        assert picture.size == (512, 384)  # ten digits, four in a row


def test_a_seed_and_steps_change_the_picture_and_repeat_it(run_json, tmp_path):
    def picture(*options):
        run_json("run", "digits", "--prompt", "seven", "--output", "p.png", "--device", "cpu", *options)
        return (tmp_path / "p.png").read_bytes()

    first = picture()
    assert picture() == first
    assert picture("--seed", "1") != first
    assert picture("--steps", "3") != first


@pytest.mark.parametrize("name", ["flux", "wan", "wan_i2v"])
def test_every_pipeline_runs(run_json, name):
    told = run_json("run", name, "--steps", "2")
    assert told["equal_to_resident_run"] is True
    assert told["races"] == 0
    assert told["peak_bytes"] <= told["capacity_bytes"]


def test_a_folder_runs(run_json):
    from pipelines.digits.cases import CHECKPOINT

    told = run_json("run", str(CHECKPOINT), "--prompt", "seven", "--steps", "2")
    assert told["equal_to_resident_run"] is True
    assert told["output"] == "outputs/checkpoint-seven.png"


def test_host_memory_can_stay_pageable(run_json):
    told = run_json("run", "digits", "--prompt", "seven", "--no-pin")
    assert told["equal_to_resident_run"] is True
    assert all(c["pinned_bytes"] == 0 for c in told["components"])


def test_blocks_stream_in_layer_mode(run_json):
    told = run_json("run", "digits", "--prompt", "seven", "--mode", "layer")
    assert told["equal_to_resident_run"] is True
    assert told["races"] == 0
    assert {c["name"]: c["treatment"] for c in told["components"]}["transformer"] == "stream"


def test_a_device_that_does_not_hold_a_component_holds_its_slots(run_json):
    whole = run_json("run", "digits", "--prompt", "seven", "--steps", "1")
    told = run_json("run", "digits", "--prompt", "seven", "--steps", "1", "--mode", "layer")
    assert told["equal_to_resident_run"] is True
    streamed = next(c for c in told["components"] if c["name"] == "transformer")
    assert streamed["use_bytes"] < streamed["weight_bytes"]
    assert told["peak_bytes"] <= told["capacity_bytes"] < whole["peak_bytes"]


def test_a_budget_counts_against_the_capacity(run_json):
    told = run_json("run", "digits", "--prompt", "seven", "--device-memory", "2.4MiB")
    assert told["equal_to_resident_run"] is True
    assert told["peak_bytes"] <= told["capacity_bytes"]


def test_the_settings_of_the_simulated_device_are_put_back(run_json):
    sim.install()
    before = sim.current_settings()
    run_json("run", "digits", "--prompt", "seven")
    assert sim.current_settings() == before


def test_what_others_hold_on_the_simulated_device_does_not_count(run_json):
    held = torch.empty(1 << 20, device=sim.install())
    told = run_json("run", "digits", "--prompt", "seven")
    assert told["peak_bytes"] <= told["capacity_bytes"] < told["weight_bytes"]
    del held


def test_without_an_accelerator_and_a_compiler_the_cpu_makes_the_picture_and_says_so(cli, run_json, monkeypatch, tmp_path):
    monkeypatch.setattr(sim, "why_unavailable", lambda: "the software accelerator needs a compiler")
    status, out, err = cli("run", "digits", "--prompt", "seven", "--output", "seven.png")
    assert (status, err) == (0, "")
    assert "table is short" in out
    assert "no accelerator, and the software accelerator needs a compiler" in out
    assert "loads" not in out
    assert (tmp_path / "seven.png").is_file()
    told = run_json("run", "digits", "--prompt", "seven")
    assert told["equal_to_resident_run"] is None
    assert told["device"] == "cpu"


def test_where_the_simulated_accelerator_does_not_build_the_cpu_makes_the_picture(run_json, monkeypatch):
    def install(**settings):
        raise OffloadStateError("it does not compile:\nline 1\nline 2")

    monkeypatch.setattr(sim, "install", install)
    told = run_json("run", "digits", "--prompt", "seven")
    assert told["device"] == "cpu"
    assert told["missing"].endswith("it does not compile: line 1 line 2")


def test_on_an_accelerator_a_resident_run_follows(run_json, as_accelerator):
    told = run_json("run", "digits", "--prompt", "seven")
    assert told["device_kind"] == "accelerator"
    assert told["equal_to_resident_run"] is True
    assert told["capacity_bytes"] == 1 << 30


def test_on_an_accelerator_the_resident_run_can_be_left_out(cli, as_accelerator):
    status, out, _ = cli("run", "digits", "--prompt", "seven", "--no-compare")
    assert status == 0
    assert "not known, a resident run was not asked for" in out


def test_on_an_accelerator_that_is_too_small_nothing_is_compared(cli, as_accelerator):
    with sim.settings(capacity=2_600_000):
        status, out, _ = cli("run", "digits", "--prompt", "seven")
    assert status == 0
    assert "a resident run does not fit" in out


def test_an_accelerator_that_is_too_small_is_bad_input(refused, as_accelerator):
    with sim.settings(capacity=2_000_000):
        assert "ran out of memory" in refused("run", "digits", "--prompt", "seven")


def test_progress_is_shown_on_a_terminal_and_the_pipeline_is_as_before(tmp_path):
    class Stepper:
        def progress_bar(self, iterable=None, total=None):
            raise AssertionError

    pipeline = Stepper()
    with (tmp_path / "terminal").open("w") as file:
        console = Console(file=file, force_terminal=True, width=80)
        with shown_progress(pipeline, "a label", console):
            assert list(pipeline.progress_bar([1, 2, 3])) == [1, 2, 3]
            with pipeline.progress_bar(total=2) as bar:
                bar.update()
                bar.update()
    text = (tmp_path / "terminal").read_text()
    assert "a label" in text
    assert "3/3" in text
    assert "2/2" in text
    assert "progress_bar" not in vars(pipeline)


def test_no_progress_is_shown_elsewhere(tmp_path):
    class Stepper:
        def progress_bar(self, iterable=None, total=None):
            raise AssertionError

    pipeline = Stepper()
    with (tmp_path / "file").open("w") as file, shown_progress(pipeline, "a label", Console(file=file)):
        assert list(pipeline.progress_bar(iter([1]))) == [1]
    assert (tmp_path / "file").read_text() == ""


def test_a_wait_is_shown_on_a_terminal_only(tmp_path):
    for terminal in (True, False):
        with (tmp_path / "shown").open("w") as file, shown_wait("a wait", Console(file=file, force_terminal=terminal, width=80)):
            pass
        assert ("a wait" in (tmp_path / "shown").read_text()) is terminal


def test_the_module_is_a_program():
    done = subprocess.run([sys.executable, "-m", "omni_offload", "pipelines", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "digits" in {entry["name"] for entry in json.loads(done.stdout)}


def test_the_pipelines_are_listed(cli):
    status, out, err = cli("pipelines")
    assert (status, err) == (0, "")
    assert "OmniFluxPipeline" in out


def test_help_is_no_error(cli):
    status, out, err = cli("run", "--help")
    assert (status, err) == (0, "")
    assert "--capacity" in out
