"""A recording tells when blocks were gathered. The other ranks are not there: what they would send is made up, and takes its time."""

import itertools
import json

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_offload.accelerator import Accelerator
from omni_offload.backends import communicators, gathering
from omni_offload.backends.distributed_layerwise import DistributedLayerwiseOffloadBackend
from omni_offload.config import DiffusionParallelConfig, DLOTransfer, LayerOptions, OffloadConfig, OffloadStrategy
from omni_offload.ranks import open_group
from omni_offload.testing import sim
from omni_offload.trace import Lane

RANKS, CHUNK = 4, 8192
CONFIG = OffloadConfig(
    strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE,
    layer_options={"dit": LayerOptions(weight_transfer=DLOTransfer.ALLGATHER)},
    parallel_config=DiffusionParallelConfig(data_parallel_size=RANKS),
)


@pytest.fixture(params=["the device's own", "gloo's"])
def world(request, device, monkeypatch):
    """One rank of four, in virtual time in which nothing but kernels, copies and gathers takes any."""
    dist.init_process_group("cpu:fake,sim:fake", rank=1, world_size=RANKS, store=FakeStore())
    monkeypatch.setattr(communicators, "meet", lambda *_, **__: "a name")
    monkeypatch.setattr(communicators, "gloo_group", lambda *_, **__: open_group(range(RANKS)))
    if request.param == "gloo's":
        monkeypatch.setattr(gathering, "backend_of_group", lambda *_: "gloo")
    monkeypatch.setattr(DistributedLayerwiseOffloadBackend, "chunk_bytes", CHUNK)
    with sim.settings(mode="virtual", launch=0.0, h2d_gbps=0.5, collective_gbps=0.25, flops=1e9, memory_gbps=100.0):
        yield device
    dist.destroy_process_group()


@pytest.fixture
def pipe(kit):
    """A pipeline whose transformer can stream."""

    return kit.Streaming()


def _recorded(pipe, x, device):
    """Run a call once to know the order, and once recorded; return the recording and the simulated device's own spans."""
    with pipe.enable_omni_offload(CONFIG, device=device) as backend, torch.no_grad():
        pipe(x)
        with sim.trace() as spans, backend.record() as recording:
            pipe(x)
    return recording, [span for span in spans if span.what.startswith("c10d::")]


def test_gathers_are_those_of_the_device(world, pipe, x):
    """Names, durations, bytes from the other ranks and what lies between them are what the simulated device itself recorded."""
    recording, theirs = _recorded(pipe, x, world)
    own = recording.lane(Lane.GATHER)
    block = sum(parameter.numel() * 4 for parameter in pipe.transformer.blocks[0].parameters())
    assert [span.name for span in own[:6]] == ["transformer.blocks.0"] * 3 + ["transformer.blocks.1"] * 3
    assert sum(span.nbytes for span in own[:3]) == pytest.approx(block * (RANKS - 1) / RANKS, rel=0.02)
    assert [span.nbytes for span in own] == [span.bytes for span in theirs]
    assert [span.seconds for span in own] == pytest.approx([span.end - span.start for span in theirs], rel=1e-9)
    shift = theirs[0].start - own[0].start
    assert [span.start + shift for span in own] == pytest.approx([span.start for span in theirs], rel=1e-9)
    assert all(before.end <= after.start for before, after in itertools.pairwise(own))


def test_a_chunk_is_gathered_while_the_next_is_copied_and_before_its_block_runs(world, pipe, x):
    """What the lanes show of one block: copies, behind each its gather beside the next copy, a wait, and then the block."""
    recording, _ = _recorded(pipe, x, world)
    name = "transformer.blocks.0"
    copies, gathers = ([s for s in recording.lane(lane) if s.name == name][:3] for lane in (Lane.COPY_IN, Lane.GATHER))
    assert all(gather.start >= copy.end - 1e-12 for copy, gather in zip(copies, gathers, strict=True))
    assert copies[1].start == pytest.approx(gathers[0].start, abs=1e-9)
    runs = next(s for s in recording.lane(Lane.COMPUTE) if s.name == name)
    waits = next(s for s in recording.lane(Lane.WAIT) if s.name == name)
    assert runs.start == pytest.approx(gathers[-1].end)
    assert waits.end == pytest.approx(gathers[-1].end)


def test_gathers_have_a_row_and_a_line(world, pipe, x):
    """In the trace file and in the table."""
    recording, _ = _recorded(pipe, x, world)
    events = json.loads(recording.to_chrome())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"].count("gathers from other ranks") == 1
    line = next(line for line in str(recording).splitlines() if line.startswith("gathers from other ranks"))
    assert line.endswith(f" {sum(span.nbytes for span in recording.lane(Lane.GATHER))} bytes")


def test_what_begins_before_or_ends_after_a_recording_is_not_shown(world, pipe, x):
    """A gather that nobody waited for while the recording ran, and one that was under way when it began."""
    with pipe.enable_omni_offload(CONFIG, device=world) as backend, torch.no_grad(), backend.record() as recording:
        accelerator = Accelerator.of(world)
        accelerator.recorder.gather_begins(accelerator.gather_stream, object(), 5)
        accelerator.recorder.gather_ends(accelerator.landing_stream, object())
    assert recording.lane(Lane.GATHER) == ()
