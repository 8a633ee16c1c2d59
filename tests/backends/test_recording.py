"""A recording tells what was copied, computed and waited for when, and what the device held: the same on every device."""

import contextlib
import itertools
import json
import sys

import pytest
import torch
from torch import nn

from omni_offload import ModuleResidency, OffloadPlan
from omni_offload.accelerator import Accelerator, clock
from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim
from omni_offload.trace import Lane, Recorder, Recording

SERIAL = [lane for lane in Lane if lane not in (Lane.CALL, Lane.USE)]


@pytest.fixture(scope="session")
def make(kit):
    """Make a pipeline whose transformer can stream."""

    class Streaming(kit.Pipe):
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

        def __init__(self, seed=0):
            super().__init__(seed)
            self.text_encoder.eval()  # whose buffers would be written back

    return Streaming


@pytest.fixture
def exact(device):
    """Virtual time in which nothing but copies and kernels takes any, on both of which the results of this module are compared."""
    with sim.settings(mode="virtual", launch=0.0, h2d_gbps=0.5, d2h_gbps=0.5, flops=1e9, memory_gbps=100.0):
        yield device


def _recorded(pipe, x, mode, device, **keys):
    """Run a call once to know the order, and once recorded; return the recording, the simulated device's own spans and the report."""
    with pipe.enable_omni_offload(mode, device=device, **keys) as backend, torch.no_grad():
        pipe(x)
        with sim.trace() as spans, backend.record() as recording:
            out = pipe(x)
        return recording, spans, backend.report(), out.cpu()


def _copies(spans, device):
    return [s for s in spans if s.what == "H2D copy" and s.stream == Accelerator.of(device).copy_stream.stream_id]


def _seconds(spans):
    return sum(span.end - span.start for span in spans)


def _rows(recording):
    """Yield the spans of each lane and stream in which one thing follows another."""
    for lane in SERIAL:
        spans = recording.lane(lane)
        for stream in {span.stream for span in spans}:
            yield [span for span in spans if span.stream == stream]


MODES = pytest.mark.parametrize(
    ("mode", "keys"),
    [("module", {}), ("module", {"device_memory": "80KiB"}), ("layer", {}), ("layer", {"slots": 2}), ("layer", {"pin_memory": False})],
    ids=str,
)


@MODES
def test_it_agrees_with_the_simulated_device(make, exact, x, mode, keys):
    """In virtual time every copy, its bytes and its duration, and the time of all kernels, are what the device itself recorded."""
    recording, spans, _, _ = _recorded(make(), x, mode, exact, **keys)
    own, theirs = recording.lane(Lane.COPY_IN), _copies(spans, exact)
    assert [span.nbytes for span in own] == [span.bytes for span in theirs]
    assert [span.seconds for span in own] == pytest.approx([span.end - span.start for span in theirs], rel=1e-9)
    shift = theirs[0].start - own[0].start
    assert [span.start + shift for span in own] == pytest.approx([span.start for span in theirs], rel=1e-9)
    uses = [(use.start + shift, use.end + shift) for use in recording.lane(Lane.USE)]
    kernels = [s for s in spans if not s.what.endswith("copy") and any(a - 1e-12 <= s.start and s.end <= b + 1e-12 for a, b in uses)]
    assert _seconds(kernels) > 0
    pageable = not keys.get("pin_memory", True)  # a stream has nothing to do while a copy keeps the host
    late = _seconds(recording.lane(Lane.HOST_WAIT)) if pageable else 0.0
    assert _seconds(kernels) * (1 - 1e-6) <= _seconds(recording.lane(Lane.COMPUTE)) <= (_seconds(kernels) + late) * (1 + 1e-6)


@MODES
def test_a_use_is_computing_and_waiting(make, exact, x, mode, keys):
    """What a component's use does not compute it waits for; where copies are slower than kernels there is something to wait for."""
    recording = _recorded(make(), x, mode, exact, **keys)[0]
    within = [use for use in recording.lane(Lane.USE) if use.name == "transformer"]
    assert len(within) == 3
    for use in within:
        parts = [
            s for s in (*recording.lane(Lane.COMPUTE), *recording.lane(Lane.WAIT)) if use.start <= s.start and s.end <= use.end + 1e-12
        ]
        assert _seconds(parts) == pytest.approx(use.seconds, rel=1e-6)
    assert _seconds((*recording.lane(Lane.WAIT), *recording.lane(Lane.HOST_WAIT))) > 0


def test_blocks_have_their_names(make, exact, x):
    """In layer mode computing, copies and waits are of blocks; what is not in a block is the component's."""
    recording = _recorded(make(), x, "layer", exact)[0]
    blocks = {f"transformer.blocks.{index}" for index in range(4)}
    assert {span.name for span in recording.lane(Lane.COMPUTE)} == {"text_encoder", "transformer", "vae", *blocks}
    assert {span.name for span in recording.lane(Lane.COPY_IN)} == {"text_encoder", "transformer", "vae", *blocks}
    assert {span.name for span in recording.lane(Lane.USE)} == {"text_encoder", "transformer", "vae"}
    assert [span.name for span in recording.lane(Lane.CALL)] == ["call"]


@pytest.mark.parametrize("timing", ["virtual", "threads"])
@MODES
def test_spans_of_an_engine_follow_one_another(make, device, x, timing, mode, keys):
    """Whatever does one thing at a time is shown doing one thing at a time, within the recording."""
    with sim.settings(mode=timing, copy_latency=1e-4):
        recording = _recorded(make(), x, mode, device, **keys)[0]
    for row in _rows(recording):
        assert all(before.end <= after.start for before, after in itertools.pairwise(row)), row
    assert all(0 <= span.start <= span.end <= recording.seconds for span in recording.spans)
    assert recording.clock == "events on the device"


@MODES
def test_the_residency_curve_is_what_the_report_says(make, device, x, mode, keys):
    """It begins and ends with what stays, and its peak is the report's."""
    recording, _, report, _ = _recorded(make(), x, mode, device, **keys)
    assert recording.peak == report.peak_device_bytes > 0
    assert recording.held[0].nbytes == recording.held[-1].nbytes == report.totals["resident_bytes"] == 0
    assert [held.start for held in recording.held] == sorted(held.start for held in recording.held)


def test_what_stays_is_held_throughout_and_computes_only_in_its_use(make, device, x):
    """A component that stays on the device is held from the start; its use is a span like any other."""
    recording, _, report, _ = _recorded(make(), x, "layer", device, components=["dit"])
    staying = sum(c.resident_bytes for c in report.components)
    assert min(held.nbytes for held in recording.held) == recording.held[0].nbytes == staying > 0
    assert [use.name for use in recording.lane(Lane.USE)] == ["text_encoder", *["transformer"] * 3, "vae"]


def test_copies_are_those_of_the_report(make, device, x):
    """All bytes that the report counts meanwhile are in a span, to the device and back."""
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad():
        before = backend.report().totals
        pipe.on_step = lambda _, out: pipe.transformer.blocks[1].register_forward_pre_hook(_writes) and out
        with backend.record() as recording:
            pipe(x)
        after = backend.report().totals
    out = recording.lane(Lane.COPY_OUT)
    assert sum(span.nbytes for span in recording.lane(Lane.COPY_IN)) == after["bytes_in"] - before["bytes_in"]
    assert sum(span.nbytes for span in out) == after["bytes_out"] - before["bytes_out"] > 0
    assert {span.name for span in out} == {"transformer.blocks.1"}


def _writes(module, args):
    module.bias.add_(1.0)


@pytest.mark.parametrize("pin", [True, False])
def test_weights_that_come_from_the_device_are_copies_to_the_host(make, device, x, pin):
    """What is found on the device when it is taken in, an adapter say, is copied to the host once, and recorded."""
    pipe = make()
    with pipe.enable_omni_offload(device=device, pin_memory=pin) as backend, torch.no_grad():
        pipe(x)
        before = backend.report().totals["bytes_out"]
        pipe.transformer.adapter = nn.Linear(640, 512, bias=False, device=device).requires_grad_(False)
        with backend.record() as recording:
            pipe(x)
        moved = backend.report().totals["bytes_out"] - before
    assert [span.nbytes for span in recording.lane(Lane.COPY_OUT)] == [moved] == [640 * 512 * 4]


@pytest.mark.parametrize("keys", [{"pin_memory": False}, {"host_memory": "32KiB"}], ids=str)
def test_pageable_weights_let_the_host_wait(make, exact, x, keys):
    """Copies that block the host, and a staging ring that is full, are seen as waits of the host."""
    recording = _recorded(make(), x, "module", exact, **keys)[0]
    waits, copies = recording.lane(Lane.HOST_WAIT), recording.lane(Lane.COPY_IN)
    assert waits
    assert _seconds(waits) >= 0.5 * _seconds(copies)


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_recording_changes_nothing(make, device, x, mode):
    """Outputs are bit for bit those of a call that is not recorded, and of a resident one."""
    *_, out = _recorded(make(), x, mode, device)
    assert torch.equal(out, make()(x))


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_without_a_recording_no_moment_is_noted(make, device, x, mode, monkeypatch):
    """A recording off costs no event: none is made before it begins, nor after it ends."""
    pipe, made = make(), []
    event = clock._timing_event
    monkeypatch.setattr(clock, "_timing_event", lambda *at: (made.append(at), event(*at))[1])
    with pipe.enable_omni_offload(mode, device=device) as backend, torch.no_grad():
        pipe(x)
        assert made == []
        with backend.record():
            pipe(x)
        count = len(made)
        assert count > 20
        pipe(x)
    assert len(made) == count


# ---- what nests, fails, or is interrupted ------------------------------------------------------------------------------------


def test_nested_uses_are_one_and_a_block_within_a_block_interrupts_it(make, exact, x):
    """`vae.decode` uses the VAE once, however often it enters itself; the computing of an inner block is not the outer one's."""
    pipe = make()
    outer, inner = pipe.transformer.blocks[0], pipe.transformer.blocks[3]
    outer.register_forward_hook(lambda _module, _args, out: inner(out))
    recording = _recorded(pipe, x, "layer", exact)[0]
    assert [use.name for use in recording.lane(Lane.USE)].count("vae") == 1
    names = [span.name for span in recording.lane(Lane.COMPUTE) if span.name.startswith("transformer.")]
    assert names[:2] == ["transformer.blocks.0", "transformer.blocks.3"]


def _fail(step, out):
    if step == 1:
        raise KeyboardInterrupt
    return out


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_a_call_that_fails_is_recorded_as_far_as_it_came(make, device, x, mode):
    """The error passes, what was recorded until then is kept, and the next recording shows nothing of it."""
    pipe = make()
    with pipe.enable_omni_offload(mode, device=device) as backend, torch.no_grad():
        whole = pipe(x).cpu()
        pipe.on_step = _fail
        with pytest.raises(KeyboardInterrupt), backend.record() as recording:
            pipe(x)
        assert [use.name for use in recording.lane(Lane.USE)] == ["text_encoder", "transformer", "transformer"]
        assert json.loads(recording.to_chrome())["traceEvents"]
        pipe.on_step = lambda _, out: out
        with backend.record() as recording:
            assert torch.equal(pipe(x).cpu(), whole)
        assert [use.name for use in recording.lane(Lane.USE)] == ["text_encoder", *["transformer"] * 3, "vae"]


def test_what_an_interrupt_left_running_ends_with_the_call(make, device, x):
    """A component that an interrupt kept from ending its use does not run on in the next call."""
    pipe = make()
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad(), backend.record() as recording:
        Accelerator.of(device).recorder.begins("left", whole=True)
        pipe(x)
        Accelerator.of(device).recorder.ends("left")
        Accelerator.of(device).recorder.begins("left")
        Accelerator.of(device).recorder.call_ends()
    assert [span.name for span in recording.lane(Lane.COMPUTE)].count("left") == 2  # before the call, and after it
    assert {span.name for span in recording.lane(Lane.USE)} == {"text_encoder", "transformer", "vae"}


def test_a_recording_that_cannot_be_read_is_lost_and_says_so(make, device, x, monkeypatch):
    """Where the device has failed so that its events cannot be read, the call's own error passes, with a note."""

    def broken(_recorder, _recording):
        raise RuntimeError("the device is gone")

    pipe = make()
    with pipe.enable_omni_offload(device=device) as backend, torch.no_grad():
        monkeypatch.setattr(Recorder, "fill", broken)
        with pytest.raises(KeyboardInterrupt) as caught, backend.record() as recording:
            raise KeyboardInterrupt
        assert caught.value.__notes__ == ["the recording is lost: RuntimeError('the device is gone')"]
        with pytest.raises(OffloadStateError, match="has not ended"):
            recording.to_chrome()
        monkeypatch.undo()
        with backend.record() as recording:
            pipe(x)
    assert recording.complete


def test_one_recording_a_device(make, device, x):
    """A second one is refused and disturbs nothing; without an offload there is none."""
    pipe = make()
    with pipe.enable_omni_offload(device=device) as backend, torch.no_grad():
        with backend.record() as recording:
            with pytest.raises(OffloadStateError, match="being recorded already"), backend.record():
                pass
            pipe(x)
        assert recording.lane(Lane.COPY_IN)
    assert Accelerator.of(device).recorder is None
    with pytest.raises(OffloadStateError, match="manages no pipeline"):
        backend.record()


def test_before_its_end_a_recording_shows_nothing(make, device, tmp_path):
    """As a table, as JSON, as a picture: each says that it has not ended."""
    with make().enable_omni_offload(device=device) as backend, backend.record() as recording:
        for show in (str, Recording.to_chrome, lambda it: it.draw(tmp_path / "t.png")):
            with pytest.raises(OffloadStateError, match="has not ended; read it after"):
                show(recording)
    assert list(tmp_path.iterdir()) == []


def test_a_device_without_timing_is_recorded_by_the_hosts_clock_and_says_so(make, device, x, monkeypatch):
    """Where events tell no time the spans are of the host's clock, and every form of the recording says what that means."""

    def refuse(*_):
        raise NotImplementedError("no such event")

    monkeypatch.setattr(clock, "_timing_event", refuse)
    recording, *_ = _recorded(make(), x, "layer", device)
    told = "the host's clock, which tells when things were queued, not when they ran: sim:0 cannot time events"
    assert recording.clock.startswith(told)
    assert told in str(recording)
    assert json.loads(recording.to_chrome())["otherData"]["clock"] == recording.clock
    assert recording.lane(Lane.COPY_IN)
    assert recording.lane(Lane.COMPUTE)
    assert 0 < recording.seconds < 60


# ---- other pipelines, threads and streams --------------------------------------------------------------------------------------


def test_a_hand_written_owner_is_recorded_too(kit, device, x):
    """A pipeline that drives its own residencies: what is loaded runs, its copies and its bytes are there."""

    class Own(kit.Pipe):
        def enable_omni_model_cpu_offload(self, *, device, pin_memory, use_hsdp, offload_components=None):
            self.stages = [ModuleResidency(m, device, pin_memory=pin_memory) for m in (self.text_encoder, self.transformer, self.vae)]

        def disable_omni_model_cpu_offload(self):
            for stage in self.stages:
                stage.restore()

        def __call__(self, x):
            x, (first, second, third) = x.to(device), self.stages
            for stage, work in ((first, self.text_encoder), (second, self.transformer), (third, self.vae)):
                with contextlib.ExitStack() as stack:
                    stage.load()
                    stage.load()  # changes nothing
                    stack.callback(stage.offload)
                    x = work(x)
            return x

    pipe = Own()
    with pipe.enable_omni_offload(device=device) as backend, torch.no_grad():
        with backend.record() as recording:
            pipe(x)
        report = backend.report()
    assert [use.name for use in recording.lane(Lane.USE)] == ["Encoder", "Transformer", "Vae"]
    assert sum(span.nbytes for span in recording.lane(Lane.COPY_IN)) == report.totals["bytes_in"]
    assert recording.peak == report.peak_device_bytes == max(kit.padded(m) for m in (pipe.text_encoder, pipe.transformer, pipe.vae))


def test_stages_that_are_loaded_together_have_one_peak(kit, device, x):
    """What a pipeline that drives its own offload holds at once is added up in the report, as in a recording."""

    class Own(kit.Pipe):
        def enable_omni_model_cpu_offload(self, *, device, pin_memory, use_hsdp, offload_components=None):
            self.stages = [ModuleResidency(m, device, pin_memory=pin_memory) for m in (self.text_encoder, self.transformer)]

        def disable_omni_model_cpu_offload(self):
            for stage in self.stages:
                stage.restore()

        def __call__(self, x):
            for stage in self.stages:
                stage.load()
            x = self.transformer(self.text_encoder(x.to(device)))
            for stage in self.stages:
                stage.offload()
            return x

    pipe = Own()
    with pipe.enable_omni_offload(device=device, components=["dit", "text_encoder"]) as backend, torch.no_grad():
        with backend.record() as recording:
            pipe(x)
        peak = backend.report().peak_device_bytes
    assert recording.peak == peak == kit.padded(pipe.text_encoder) + kit.padded(pipe.transformer)


def test_another_pipelines_bytes_are_not_in_the_curve(make, device, x):
    """Copies of all pipelines go through the device's one engine and are shown; bytes held are those of the recorded pipeline."""
    pipe, other = make(), make(seed=1)
    with pipe.enable_omni_offload(device=device) as backend, other.enable_omni_offload(device=device), torch.no_grad():
        with backend.record() as recording:
            other(x)
        assert recording.peak == 0
        assert recording.lane(Lane.COPY_IN)


def test_every_stream_has_a_row_of_its_own(make, device, x):
    """Computing on several streams may overlap, so each has a row, which names the stream."""
    pipe, side = make(), torch.Stream(device)
    with pipe.enable_omni_offload("layer", device=device) as backend, torch.no_grad(), backend.record() as recording:
        pipe(x)
        with side:
            pipe(x)
    streams = {span.stream for span in recording.lane(Lane.COMPUTE)}
    assert len(streams) == 2
    rows = [event["args"]["name"] for event in json.loads(recording.to_chrome())["traceEvents"] if event["name"] == "thread_name"]
    assert {f"compute (stream {stream})" for stream in streams} < {*rows}
    assert rows.count("copies to the device") == 1


# ---- what is shown ---------------------------------------------------------------------------------------------------------------


@MODES
def test_the_trace_file_is_in_the_trace_event_format(make, exact, x, mode, keys):
    """Every event has what its kind needs; rows are named; slices are the spans, counters the residency curve."""
    recording, _, report, _ = _recorded(make(), x, mode, exact, **keys)
    data = json.loads(recording.to_chrome())
    assert data["displayTimeUnit"] == "ms"
    kinds = {"M": [], "X": [], "C": []}
    for event in data["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        kinds[event["ph"]].append(event)
    assert all(isinstance(event["dur"], float) and event["dur"] >= 0 for event in kinds["X"])
    rows = {event["tid"]: event["args"]["name"] for event in kinds["M"] if event["name"] == "thread_name"}
    assert {event["tid"] for event in kinds["X"]} == rows.keys()
    assert all(event["cat"] == rows[event["tid"]] for event in kinds["X"])
    assert [(e["name"], e["ts"] / 1e6) for e in kinds["X"]] == [(s.name, pytest.approx(s.start)) for s in recording.spans]
    assert sum(e["args"].get("bytes", 0) for e in kinds["X"]) == sum(span.nbytes for span in recording.spans)
    assert max(event["args"]["bytes"] for event in kinds["C"]) == report.peak_device_bytes
    assert [event["ts"] for event in kinds["C"]] == sorted(event["ts"] for event in kinds["C"])


def test_the_table_has_a_line_for_each_lane(make, exact, x):
    """`str()` tells device, clock and peak, and how many spans, milliseconds and bytes a lane has."""
    recording, _, report, _ = _recorded(make(), x, "layer", exact)
    head, *lines = str(recording).splitlines()
    assert head.startswith("Streaming, layerwise on sim:0: ")
    assert head.endswith(f"by events on the device; at most {report.peak_device_bytes} bytes held")
    copies = recording.lane(Lane.COPY_IN)
    line = next(line for line in lines if line.startswith("copies to the device"))
    assert line.split()[4:6] == [str(len(copies)), "spans"]
    assert line.endswith(f" {sum(span.nbytes for span in copies)} bytes")


def test_the_picture_shows_every_lane(make, device, x, tmp_path):
    """The PNG has the colours of the lanes that have spans, and of no other."""
    from matplotlib.colors import to_rgb
    from PIL import Image

    from omni_offload.trace.timeline import _COLOURS, _SHADES

    with sim.settings(mode="virtual", h2d_gbps=0.05, launch=0.0, flops=1e8):
        recording = _recorded(make(), x, "layer", device)[0]
    recording.draw(tmp_path / "timeline.png")
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.width > 1000
        found = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 24)}
    for lane, colour in _COLOURS.items():
        shown = tuple(round(255 * (1 - _SHADES[0] + _SHADES[0] * part)) for part in to_rgb(colour))
        near = any(max(abs(a - b) for a, b in zip(shown, pixel, strict=True)) <= 2 for pixel in found)
        assert near == bool(recording.lane(lane)), lane


def test_an_empty_recording_is_shown_too(make, device, tmp_path):
    """A body that does nothing gives a table, a trace and a picture without spans."""
    with make().enable_omni_offload(device=device) as backend, backend.record() as recording:
        pass
    assert len(str(recording).splitlines()) == 1
    assert [event["ph"] for event in json.loads(recording.to_chrome())["traceEvents"]] == ["M", "C"]
    recording.draw(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(make, device, tmp_path, monkeypatch):
    """The error names the extra, and nothing is written."""
    with make().enable_omni_offload(device=device) as backend, backend.record() as recording:
        pass
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OffloadStateError, match=r"pip install 'omni-offload\[plot\]'"):
        recording.draw(tmp_path / "t.png")
    assert list(tmp_path.iterdir()) == []
