"""What docs/comparison.md says of diffusers and accelerate is so with the versions that are installed here."""

import gc
import inspect
import re
from pathlib import Path

import accelerate
import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline

import pipelines
from omni_offload.testing import sim
from pipelines.flux.cases import FLUX

ARGUMENTS = {"prompt": "a red cat", "height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 32, "output_type": "pt"}
PAGES = Path(__file__).parents[2] / "docs"
MODES = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="sim"),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="sim"),
    "group": lambda pipe: pipe.enable_group_offload(onload_device=torch.device("sim"), num_blocks_per_group=1),
    "streamed group": lambda pipe: pipe.enable_group_offload(onload_device=torch.device("sim"), offload_type="leaf_level", use_stream=True),
}


@pytest.fixture
def theirs(device):
    """Return a plain Flux pipeline; what is left of it on the device goes with it."""
    pipe = FluxPipeline(**FLUX.make_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    yield pipe
    pipe.remove_all_hooks()
    sim.reset_races()


@pytest.fixture
def ours(device):
    pipe = FLUX.make_pipeline()
    yield pipe
    pipe.disable_omni_offload()


def call(pipe, **changes):
    return pipe(**ARGUMENTS, **changes, generator=torch.Generator().manual_seed(0)).images.cpu()


def modules(pipe):
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def weight_bytes(pipe):
    tensors = {id(t): t for part in modules(pipe) for t in (*part.parameters(), *part.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def on_device(module):
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.device.type == "sim")


def objects(pipe):
    return [list(pipe.transformer.parameters()), list(pipe.text_encoder.buffers())]


def same(before, after):
    return [all(a is b for a, b in zip(one, other, strict=True)) for one, other in zip(before, after, strict=True)]


def moved(pipe):
    """Return the bytes that one call copies in each direction."""
    sim.reset_counters()
    call(pipe)
    return sim.h2d_bytes(), sim.d2h_bytes()


def stop(*_):
    raise ValueError("stop")


@pytest.mark.parametrize("mode", MODES)
def test_their_outputs_are_right_too(theirs, mode):
    """All four modes give the outputs of a resident run, bit for bit."""
    wanted = call(theirs)
    MODES[mode](theirs)
    assert torch.equal(call(theirs), wanted)


def test_model_offload_copies_every_weight_back(theirs, ours):
    """Their model offload, and their group offload without a stream, copy all weights both ways; ours in only."""
    total = weight_bytes(theirs)
    for mode in ("model", "group"):
        MODES[mode](theirs)
        assert min(moved(theirs)) >= total
        theirs.remove_all_hooks()
    with ours.enable_omni_offload(device="sim"):
        to_device, to_host = moved(ours)
    assert to_device >= total
    assert to_host < 0.02 * total


@pytest.mark.parametrize("mode", ["sequential", "streamed group"])
def test_their_finer_modes_need_not_copy_back(theirs, mode):
    """Sequential offload, and group offload with a stream, keep the host's copies."""
    MODES[mode](theirs)
    _, to_host = moved(theirs)
    assert to_host < 0.02 * weight_bytes(theirs)


@pytest.mark.parametrize(("mode", "left"), [("model", True), ("sequential", False), ("group", False), ("streamed group", False)])
def test_what_a_failed_call_leaves_on_the_device(theirs, mode, left):
    """Their model offload lets go in the last line of a call, which an error skips; the finer modes let go layer by layer."""
    MODES[mode](theirs)
    with pytest.raises(ValueError, match="stop"):
        call(theirs, callback_on_step_end=stop)
    gc.collect()
    assert any(on_device(part) for part in modules(theirs)) is left


def test_a_failed_call_of_ours_leaves_nothing(ours):
    """Ours lets go however a call ends."""
    with ours.enable_omni_offload(device="sim"):
        with pytest.raises(ValueError, match="stop"):
            call(ours, callback_on_step_end=stop)
        gc.collect()
        assert not any(on_device(part) for part in modules(ours))


def test_their_hooks_see_forward_and_decorated_methods_only(theirs):
    """Their model offload sees `vae.decode`, which diffusers decorates, and not a submodule or another method that is called directly."""
    MODES["model"](theirs)
    with torch.no_grad():
        theirs.vae.decode(torch.zeros(1, 4, 8, 8, device="sim"))
        norm = next(part for part in theirs.text_encoder.modules() if isinstance(part, torch.nn.LayerNorm))
        with pytest.raises(RuntimeError, match="same device"):
            norm(torch.ones(1, 32, device="sim"))


@pytest.mark.parametrize(
    ("mode", "parameters", "buffers"),
    [("model", True, False), ("sequential", False, False), ("group", True, False), ("streamed group", True, True)],
)
def test_which_objects_they_keep(theirs, mode, parameters, buffers):
    """`nn.Module.to` makes new buffers, and accelerate's hooks new parameters too."""
    before = objects(theirs)
    MODES[mode](theirs)
    call(theirs)
    assert same(before, objects(theirs)) == [parameters, buffers]


def test_ours_are_the_same_objects(ours):
    """Parameters and buffers are never replaced."""
    before = objects(ours)
    with ours.enable_omni_offload(device="sim"):
        call(ours)
        assert same(before, objects(ours)) == [True, True]


@pytest.mark.parametrize(("mode", "place"), [("model", "cpu"), ("sequential", "meta"), ("group", "cpu"), ("streamed group", "cpu")])
def test_where_a_weight_is_that_is_used_outside_of_a_forward(theirs, mode, place):
    """On the host, where torch refuses to mix devices; under sequential offload it has no values."""
    MODES[mode](theirs)
    weight = theirs.transformer.context_embedder.weight
    assert weight.device.type == place
    if place == "cpu":
        with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
            torch.nn.functional.linear(torch.ones(1, weight.shape[1], device="sim"), weight)


@pytest.mark.parametrize(("mode", "place"), [("model", "cpu"), ("sequential", "meta"), ("group", "cpu"), ("streamed group", "cpu")])
def test_where_their_state_dict_is_between_calls(theirs, mode, place):
    """Under sequential offload a component's state_dict holds meta tensors, without values; elsewhere it is whole."""
    MODES[mode](theirs)
    call(theirs)
    theirs.maybe_free_model_hooks()
    assert {tensor.device.type for tensor in theirs.transformer.state_dict().values()} == {place}


@pytest.mark.parametrize("mode", ["sequential", "group"])
def test_their_finer_modes_need_less_memory_than_the_largest_component(theirs, ours, mode):
    """Blocks and leaves need less device memory than whole components, and no declaration."""
    with ours.enable_omni_offload(device="sim"):
        call(ours)
        sim.reset_peak()
        call(ours)
        whole = sim.peak()
    MODES[mode](theirs)
    largest = max(sum(p.nbytes for p in part.parameters()) for part in modules(theirs))
    held = []
    for block in theirs.transformer.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: held.append(on_device(theirs.transformer)))
    call(theirs)
    assert max(held) < largest <= whole


def test_enabling_again_replaces_the_former(theirs):
    """Their second enable, for another device, takes the place of the first; ours is refused (test_lifecycle)."""
    theirs.enable_model_cpu_offload(device="sim:0")
    theirs.enable_model_cpu_offload(device="sim:1")
    assert theirs._offload_device == torch.device("sim:1")


def test_how_many_of_their_pipelines_declare_a_sequence():
    """Model offload is there for more pipelines of diffusers than are registered here."""
    sources = Path(diffusers.__file__).parent.glob("pipelines/**/*.py")
    declared = sum(
        len(re.findall(r"^    model_cpu_offload_seq = ", source.read_text(encoding="utf-8"), re.MULTILINE)) for source in sources
    )
    assert declared > 200
    assert len(pipelines.registered()) < declared


def test_what_only_they_can_be_asked_for():
    """Disk, several devices and budgets for each, blocks: parameters that exist there. A budget in bytes: a parameter that does not."""
    assert {"offload_to_disk_path", "use_stream", "num_blocks_per_group"} <= {
        *inspect.signature(DiffusionPipeline.enable_group_offload).parameters
    }
    assert {*inspect.signature(DiffusionPipeline.enable_model_cpu_offload).parameters} == {"self", "gpu_id", "device"}
    assert "max_memory" in inspect.signature(accelerate.infer_auto_device_map).parameters
    assert "offload_dir" in inspect.signature(accelerate.disk_offload).parameters
    assert "device_map" in inspect.getsource(DiffusionPipeline.from_pretrained)


def rows(page):
    """Return the cells of every row of a benchmark's tables."""
    lines = (PAGES / "benchmarks" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_figures_are_those_of_the_benchmarks():
    """What the page says of speed stands on the benchmarks' pages, as their last run wrote them."""
    page = (PAGES / "comparison.md").read_text(encoding="utf-8")
    steps = {(row[0], row[1]): row for row in rows("layerwise") if len(row) == 7}
    ratios = ("1", "2", "4")

    def told(way, column=3):
        return ", ".join(f"{float(steps[ratio, way][column]) / float(steps[ratio, 'everything resident'][3]):.2f}" for ratio in ratios)

    group = "group, blocks, stream"
    assert f"| {told(group, 5)} of all computation | {told(group)} |" in page
    assert f"| the same, at twice that peak | {told('omni-offload, 23.1 MiB, 3 slots')} |" in page
    for ratio in ratios:
        assert float(steps[ratio, "omni-offload, 23.1 MiB, 3 slots"][2]) / float(steps[ratio, group][2]) == pytest.approx(2, abs=0.05)
    assert f"leaves with `record_stream`: {told('group, leaves, stream, record_stream')} |" in page
    assert f"| {dict(row[:2] for row in rows('layerwise_overhead'))['ratio']} of theirs |" in page
    times = [float(row[6]) for row in rows("model_level") if len(row) == 12 and row[6].startswith("0.")]
    assert f"takes\n{min(times):.2f} to {max(times):.2f} of its time" in page
