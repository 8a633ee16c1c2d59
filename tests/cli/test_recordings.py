"""`omni-offload run --timeline FILE.png --trace FILE.json` records the offloaded run, on any device; what stands against it is told first."""

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

from omni_offload.cli import places, run
from omni_offload.cli.places import Kind, Place
from omni_offload.testing import sim

SEVEN = ("run", "digits", "--prompt", "seven", "--steps", "1")


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch):
    """As on a machine without an accelerator, also where there is one."""
    monkeypatch.setattr(places, "find_accelerator", lambda: None)


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fail where a pipeline is loaded or run."""

    def refuse(*_):
        raise AssertionError("it was run")

    monkeypatch.setattr(run, "generate", refuse)


@pytest.fixture(params=[Kind.SIMULATED, Kind.ACCELERATOR], ids=lambda kind: kind.value)
def place(request, monkeypatch):
    """The simulated device as itself, and as one that passes for a real one."""
    found = Place(device=sim.install(), kind=request.param)
    monkeypatch.setattr(run, "choose_place", lambda _asked: found)
    return found


def _events(path, kind):
    return [event for event in json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == kind]


def test_a_run_in_layer_mode_is_recorded(place, run_json):
    """Bytes copied and bytes held are those that the run reports; the picture is a picture; the budget holds."""
    told = run_json(*SEVEN, "--mode", "layer", "--device-memory", "2MiB", "--timeline", "t.png", "--trace", "t.json")
    assert (told["timeline"], told["trace"]) == ("t.png", "t.json")
    assert told["equal_to_resident_run"] is True
    slices = _events("t.json", "X")
    assert {"calls", "components in use", "compute", "copies to the device"} <= {event["cat"] for event in slices}
    copied = sum(event["args"]["bytes"] for event in slices if event["cat"] == "copies to the device")
    assert copied == sum(component["bytes_in"] for component in told["components"])
    assert {"transformer.transformer_blocks.1", "vae"} <= {event["name"] for event in slices if event["cat"] == "compute"}
    assert 0 < max(event["args"]["bytes"] for event in _events("t.json", "C")) <= 2 << 20
    with Image.open("t.png") as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_a_run_in_module_mode_is_recorded(cli):
    """Whole components are copied and computed; the table says where the files are."""
    status, out, err = cli(*SEVEN, "--trace", "t.json")
    assert (status, err) == (0, "")
    assert "trace: t.json (ui.perfetto.dev shows it)" in out
    assert "timeline" not in out
    names = [event["name"] for event in _events("t.json", "X") if event["cat"] == "copies to the device"]
    assert list(dict.fromkeys(names)) == ["text_encoder", "text_encoder_2", "transformer", "vae"]


def test_recording_does_not_change_the_picture(run_json, tmp_path):
    """The PNG is the same, byte for byte; without the options there is no recording."""
    told = run_json(*SEVEN, "--mode", "layer", "--output", "a.png")
    assert told["timeline"] is told["trace"] is None
    run_json(*SEVEN, "--mode", "layer", "--output", "b.png", "--trace", "t.json")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--timeline", "t.svg"], "--timeline must end in .png, not 't.svg'"),
        (["--trace", "t.png"], "--trace must end in .json, not 't.png'"),
        (["--timeline", "missing/t.png"], "the timeline cannot be written to missing/t.png: No such file"),
        (["--trace", "missing/t.json"], "the trace cannot be written to missing/t.json: No such file"),
        (["--timeline", "folder.png"], "--timeline folder.png is a folder; name a file in it"),
        (["--trace", "folder.json"], "--trace folder.json is a folder; name a file in it"),
        (["--output", "t.png", "--timeline", "./t.png"], "--timeline t.png is the picture's file too"),
        (["--timeline", "t.png", "--trace", "t.json", "--device", "cpu"], "--timeline and --trace: a run on the CPU moves nothing"),
        (["--trace", "t.json", "--device", "cpu"], "--trace: a run on the CPU moves nothing that could be recorded (the CPU was asked"),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_what_stands_against_it_is_told_before_anything_runs(refused, tmp_path, arguments, says):
    """A wrong suffix, a folder, a file that cannot be written, the picture's own file, a device that nothing is moved to."""
    for name in ("folder.png", "folder.json"):
        (tmp_path / name).mkdir()
    assert says in refused(*SEVEN, *arguments)
    assert {path.name for path in tmp_path.iterdir()} <= {"folder.png", "folder.json", "outputs"}


@pytest.mark.usefixtures("nothing_runs")
def test_a_file_that_may_not_be_written_is_told_before_anything_runs(refused, monkeypatch):
    """What the system says stands in the line."""

    opened = Path.open

    def open_or_refuse(path, *args, **kwargs):
        if path.name == "t.json":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_or_refuse)
    assert "the trace cannot be written to t.json: Permission denied" in refused(*SEVEN, "--trace", "t.json")


@pytest.mark.usefixtures("nothing_runs")
def test_without_matplotlib_a_timeline_is_refused_and_a_trace_is_not(refused, monkeypatch):
    """The line names the extra that brings it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert "pip install 'omni-offload[plot]'" in refused(*SEVEN, "--timeline", "t.png")
    with pytest.raises(AssertionError, match="it was run"):
        refused(*SEVEN, "--trace", "t.json")


def test_a_run_that_fails_leaves_what_was_recorded_until_then(refused):
    """The line says where; the file ends where the run did."""
    message = refused(*SEVEN, "--capacity", "2350000", "--trace", "t.json")
    assert "too small for this run" in message
    assert message.endswith("; what was recorded until then is in t.json\n")
    names = {event["name"] for event in _events("t.json", "X") if event["cat"] == "components in use"}
    assert "text_encoder" in names
    assert "vae" not in names


def test_a_run_that_fails_before_it_is_recorded_leaves_nothing(refused, tmp_path):
    """There is no file, and the line does not speak of one."""
    assert "recorded" not in refused(*SEVEN, "--capacity", "1MiB", "--trace", "t.json", "--timeline", "t.png")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_full_disk_is_told(refused, monkeypatch):
    """What cannot be written in the end is one line too."""

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "the recording cannot be written to t.json: No space left on device" in refused(*SEVEN, "--trace", "t.json")
