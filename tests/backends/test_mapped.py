"""Blocks that stream from mapped safetensors: what is mapped and what is not, and that nobody sees a difference but in memory."""

import contextlib
import copy
import importlib.metadata
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from omni_offload import LayerOptions, OffloadConfig, OffloadPlan, OffloadStrategy, get_offload_backend
from omni_offload.accelerator import Accelerator
from omni_offload.backends import manage
from omni_offload.backends.rotation import Rotation
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.residency import host_memory
from omni_offload.residency.checkpoint import remember_files
from omni_offload.testing import sim
from omni_offload.testing.inject import Interrupt, interrupted_at, lines_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc, as Linux has it")


@pytest.fixture(scope="module")
def make(kit):
    """Make a pipeline whose DiT has blocks, and buffers of which its file does not know."""

    class Transformer(kit.Transformer):
        def __init__(self):
            super().__init__()
            self.register_buffer("freqs", torch.full((64,), 0.5), persistent=False)
            self.blocks[1].register_buffer("large", torch.full((513, 513), 0.25), persistent=False)

        def forward(self, x, cond=None):
            return super().forward(x + self.freqs, cond)

    class Streaming(kit.Pipe):
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.transformer = Transformer().requires_grad_(False)

    return Streaming


@pytest.fixture
def pipe(make, device):
    return make()


@pytest.fixture
def expected(make, x):
    return make()(x)


@pytest.fixture
def file(make, tmp_path):
    """The checkpoint of its DiT."""
    path = tmp_path / "model.safetensors"
    save_file(make().transformer.state_dict(), path)
    return path


def config(checkpoint=None, *, resident_layers=None, **fields):
    options = LayerOptions(weight_transfer="rank-local", checkpoint=checkpoint, resident_layers=resident_layers)
    return OffloadConfig(strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE, **({"layer_options": {"dit": options}} | fields))


def enable(pipe, device, *args, **fields):
    return manage(pipe, get_offload_backend(config(*args, **fields), device))


def told(backend):
    return {part.name: part for part in backend.report().components}["transformer"]


def in_file(path, *tensors):
    """How many of some tensors lie in the mapping of a file."""
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if str(path) in line
    ]
    return sum(any(first <= tensor.data_ptr() < end for first, end in spans) for tensor in tensors)


def same(pipe, x, expected):
    with torch.no_grad():
        return torch.equal(pipe(x).cpu(), expected)


def test_weights_are_the_file(pipe, device, file, x, expected):
    """What equals the file lies there while enabled and streams through the staging ring; afterwards nothing does. Twice."""
    parameters = [*pipe.transformer.parameters()]
    for _ in range(2):
        with enable(pipe, device, file, host_memory=1 << 20) as backend:
            assert in_file(file, *parameters) == len(parameters)
            for _ in range(2):
                assert same(pipe, x, expected)
            part = told(backend)
            assert part.mapped_bytes == sum(parameter.nbytes for parameter in parameters)
            assert part.transfer == "staged"
            assert part.pinned_bytes <= part.weight_bytes - part.mapped_bytes
            assert in_file(file, *parameters) == len(parameters)
        assert in_file(file, *parameters) == 0
        assert str(file) not in Path("/proc/self/maps").read_text(encoding="utf-8")
        assert all(a is b for a, b in zip(pipe.transformer.parameters(), parameters, strict=True))
        assert same(pipe, x, expected)


def test_what_the_file_does_not_hold_keeps_its_memory(pipe, device, file, x, expected):
    """Buffers that are not persistent have their values at once, in ordinary memory; the report says why."""
    buffers = pipe.transformer.freqs, pipe.transformer.blocks[1].large
    with enable(pipe, device, file) as backend:
        assert [float(buffer.flatten()[0]) for buffer in buffers] == [0.5, 0.25]
        assert in_file(file, *buffers) == 0
        assert same(pipe, x, expected)
        assert told(backend).unmapped == ("transformer.freqs, transformer.blocks.1.large: not in the file",)
        assert "transformer, not mapped: transformer.freqs, transformer.blocks.1.large: not in the file" in str(backend.report())


def test_unpinned(pipe, device, file, x, expected):
    """Without pinning there is no staging ring; copies come from the file."""
    with enable(pipe, device, file, pin_cpu_memory=False) as backend:
        assert same(pipe, x, expected)
        assert (told(backend).transfer, sim.pinned_bytes()) == ("serial", 0)
        assert told(backend).mapped_bytes > 0


def test_residents_and_places_change(pipe, device, file, x, expected):
    """Resident blocks are mapped too, and stay so where others become resident."""
    with enable(pipe, device, file, resident_layers=2) as backend:
        assert same(pipe, x, expected)
        mapped = told(backend).mapped_bytes
        residency = backend._rotation.members["transformer"].owner.residency
        residency.arrange(number=1, limit=None)
        assert same(pipe, x, expected)
        assert told(backend).mapped_bytes == mapped == sum(p.nbytes for p in pipe.transformer.parameters())


@pytest.mark.parametrize("kind", ["index", "folder", "pipeline", "remembered"])
def test_where_the_file_is(pipe, device, file, x, expected, kind):
    """A checkpoint is an index of shards, a folder, that of a pipeline; or the files that the component was loaded from."""
    tensors = load_file(file)
    folder = file.parent / ("transformer" if kind == "pipeline" else "weights")
    folder.mkdir()
    names = [*tensors]
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for shard, part in shards.items() for name in part}}), encoding="utf-8")
    if kind == "remembered":
        remember_files(pipe.transformer, [folder / shard for shard in shards])
    asked = {"index": index, "folder": folder, "pipeline": file.parent, "remembered": None}[kind]
    with enable(pipe, device, asked) as backend:
        assert same(pipe, x, expected)
        assert told(backend).mapped_bytes == sum(parameter.nbytes for parameter in pipe.transformer.parameters())


def test_other_strategies_map_nothing(pipe, device, file, x, expected):
    """Only rank-local blocks are mapped: not those of a rank that gathers alone, nor in plain layerwise mode."""
    remember_files(pipe.transformer, [file])
    gathers = OffloadConfig(
        strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE, layer_options={"dit": LayerOptions(weight_transfer="allgather")}
    )
    for asked in (gathers, OffloadConfig(strategy=OffloadStrategy.LAYERWISE)):
        with manage(pipe, get_offload_backend(asked, device)) as backend:
            assert same(pipe, x, expected)
            assert (told(backend).mapped_bytes, told(backend).unmapped) == (0, ())


def test_a_block_travels_as_one(pipe, device, file, x, expected, monkeypatch):
    """What lies together in the file is one copy, whatever the order of the weights in the module."""
    copied = []
    whole = host_memory.HostMemory.copy

    def count(self, target, source, *, pinned):
        copied.append(source.numel())
        whole(self, target, source, pinned=pinned)

    with enable(pipe, device, file):
        monkeypatch.setattr(host_memory.HostMemory, "copy", count)
        assert same(pipe, x, expected)
    assert copied.count(64 * 64 * 4 + 64 * 4) >= 4


def test_two_pipelines_share_it(pipe, make, device, file, x, expected):
    """A component of two pipelines is mapped once, until the second is disabled."""
    other = make()
    other.transformer = pipe.transformer
    parameters = [*pipe.transformer.parameters()]
    enable(pipe, device, file)
    with enable(other, device, file) as backend:
        assert same(pipe, x, expected)
        pipe.disable_omni_offload()
        assert same(other, x, expected)
        assert told(backend).mapped_bytes == sum(parameter.nbytes for parameter in parameters)
        assert in_file(file, *parameters) == len(parameters)
    assert in_file(file, *parameters) == 0
    assert same(other, x, expected)


@pytest.mark.parametrize("copied", ["deepcopy", "state_dict", "save"])
def test_copies_are_whole(pipe, device, file, x, expected, copied, tmp_path):
    """What is copied or saved while it is mapped has memory of its own, and all values."""
    with enable(pipe, device, file):
        assert same(pipe, x, expected)
        if copied == "deepcopy":
            found = copy.deepcopy(pipe.transformer.state_dict())
        elif copied == "state_dict":
            found = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
        else:
            torch.save(pipe.transformer.state_dict(), tmp_path / "saved.pt")
            found = torch.load(tmp_path / "saved.pt", weights_only=True)
        assert in_file(file, *found.values()) == 0
    assert all(torch.equal(found[name], tensor) for name, tensor in pipe.transformer.state_dict().items())


# ---- what is not mapped, and why -----------------------------------------------------------------------------------------------


def _fuse(pipe, _):
    pipe.transformer.blocks[2].weight.add_(torch.eye(64))


def _cast(pipe, _):
    pipe.transformer.blocks[2].weight = nn.Parameter(pipe.transformer.blocks[2].weight.to(torch.float16).float().double())
    pipe.transformer.blocks[2].bias = nn.Parameter(pipe.transformer.blocks[2].bias.double())
    pipe.transformer.blocks[2].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    pipe.transformer.blocks[2].register_forward_hook(lambda *args: args[2].float())
    pipe.transformer.requires_grad_(requires_grad=False)


def _reshape(_, file):
    tensors = load_file(file)
    save_file({**tensors, "blocks.2.weight": tensors["blocks.2.weight"].reshape(32, 128)}, file)


def _leave_out(_, file):
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "blocks.2.weight"}, file)


def _transpose(pipe, _):
    weight = pipe.transformer.blocks[2].weight
    weight.data = weight.data.t().contiguous().t()


def _misalign(_, file):
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip(b" ")
    header += b" " * (1 + (-len(header)) % 4)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


@pytest.mark.parametrize(
    ("change", "reason", "weights"),
    [
        (_fuse, "other values than the file's", "blocks.2.weight"),
        (_cast, "of another type or shape in the file", "blocks.2.weight, transformer.blocks.2.bias"),
        (_reshape, "of another type or shape in the file", "blocks.2.weight"),
        (_leave_out, "not in the file", "freqs, transformer.blocks.1.large, transformer.blocks.2.weight"),
        (_transpose, "not one contiguous tensor", "blocks.2.weight"),
        (_misalign, "not aligned in the file", "pos_embed"),
    ],
)
def test_another_tensor_keeps_its_memory(pipe, device, file, x, change, reason, weights):
    """A weight that is not the file's, as one with an adapter fused into it, is not mapped; the others are, and the report says why."""
    change(pipe, file)
    before, want = file.read_bytes(), pipe(x)
    with enable(pipe, device, file) as backend:
        assert same(pipe, x, want)
        lines = told(backend).unmapped
        line = next(one for one in lines if one.endswith(f": {reason}"))
        assert line.removeprefix("transformer.").startswith(weights)
        assert in_file(file, pipe.transformer.blocks[2].weight) == 0
        if change is not _misalign:
            assert in_file(file, pipe.transformer.blocks[3].weight) == 1
    assert file.read_bytes() == before
    assert same(pipe, x, want)


def test_many_that_are_not_mapped(pipe, device, file, x):
    """The report names three of those that have one reason."""
    for parameter in pipe.transformer.parameters():
        parameter.add_(1e-3)
    want = pipe(x)
    with enable(pipe, device, file) as backend:
        assert same(pipe, x, want)
        assert told(backend).mapped_bytes == 0
        line = next(line for line in told(backend).unmapped if "other values" in line)
        assert re.fullmatch(r"transformer\.\S+, transformer\.\S+, transformer\.\S+ and others: other values than the file's", line)


def test_equal_tensors_that_the_file_has_once(pipe, device, file, x):
    """A tensor that only its values make another's never shares its bytes: what is written to one is not seen in the other."""
    first = pipe.transformer.blocks[0].weight
    pipe.transformer.twin = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(requires_grad=False)
    pipe.transformer.twin[0].weight.copy_(first)
    pipe.transformer.other = nn.Sequential(nn.Linear(2, 2)).requires_grad_(requires_grad=False)  # ends alike, and is of another shape
    with enable(pipe, device, file) as backend:
        assert any(line.endswith("0.weight: in the file once for several tensors") for line in told(backend).unmapped)
        pipe.transformer.twin[0].weight.add_(1)
        assert not torch.equal(pipe.transformer.twin[0].weight, first)
    assert torch.equal(pipe.transformer.twin[0].weight, first + 1)


def test_names_with_another_beginning(pipe, device, file, x, expected):
    """A file may name what is in the component otherwise, above the modules with weights: values decide."""
    names = {name: f"model.{name.replace('blocks.', 'model.stack.blocks.')}" for name in load_file(file)}
    save_file({names[name]: tensor for name, tensor in load_file(file).items()}, file)
    with enable(pipe, device, file) as backend:
        assert same(pipe, x, expected)
        assert told(backend).mapped_bytes == sum(parameter.nbytes for parameter in pipe.transformer.parameters())


def test_tied_weights(pipe, device, file, x):
    """Tied weights are mapped once, under any of their names, and stay tied."""
    pipe.transformer.blocks[3].weight = pipe.transformer.blocks[0].weight
    want = pipe(x)
    with enable(pipe, device, file):
        assert in_file(file, pipe.transformer.blocks[3].weight) == 1
        assert same(pipe, x, want)
    assert pipe.transformer.blocks[3].weight is pipe.transformer.blocks[0].weight
    assert same(pipe, x, want)


def test_weights_found_on_the_device(pipe, device, file, x, expected):
    """Weights that were on the device are compared, and mapped, too."""
    pipe.transformer.to(device)
    with enable(pipe, device, file) as backend:
        assert same(pipe, x, expected)
        assert in_file(file, *pipe.transformer.parameters()) == len([*pipe.transformer.parameters()])
        assert told(backend).mapped_bytes > 0
    assert same(pipe, x, expected)


# ---- while it is mapped --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "data", "device"])
def test_edits_are_the_process_s_own(pipe, device, file, x, where):
    """What is written to a mapped weight, as when an adapter is fused, is in force, survives disabling, and never reaches the file."""
    before = file.read_bytes()
    with enable(pipe, device, file) as backend:
        pipe(x)
        weight = pipe.transformer.blocks[2].weight
        if where == "device":
            with backend.writing("transformer"):
                pipe.transformer.pos_embed.data.add_(1)
        else:
            (weight if where == "host" else weight.data).add_(torch.eye(64))
        found = pipe(x).cpu()
        assert file.read_bytes() == before
    assert torch.equal(pipe(x), found)
    assert file.read_bytes() == before
    with enable(pipe, device, file) as backend:
        assert any("other values" in reason for reason in told(backend).unmapped)
        assert same(pipe, x, found)


def test_replaced_and_cast_weights(pipe, device, file, x):
    """A weight that gets other memory while enabled leaves the file."""
    with enable(pipe, device, file) as backend:
        pipe(x)
        pipe.transformer.blocks[1].weight = nn.Parameter(torch.eye(64), requires_grad=False)
        pipe.transformer.pos_embed.data = pipe.transformer.pos_embed.data + 1
        found = pipe(x).cpu()
        assert {line.rpartition(": ")[2] for line in told(backend).unmapped} == {"not in the file", "other values than the file's"}
        assert in_file(file, pipe.transformer.blocks[1].weight, pipe.transformer.pos_embed, pipe.transformer.blocks[0].weight) == 1
    assert torch.equal(pipe(x), found)


def test_a_parameter_around_mapped_memory(pipe, device, file, x, expected):
    """Another parameter object on the bytes of the former one is where it was."""
    with enable(pipe, device, file):
        pipe.transformer.blocks[1].weight = nn.Parameter(pipe.transformer.blocks[1].weight.data, requires_grad=False)
        assert same(pipe, x, expected)
        assert in_file(file, pipe.transformer.blocks[1].weight) == 1
    assert in_file(file, pipe.transformer.blocks[1].weight) == 0
    assert same(pipe, x, expected)


def test_saved_over_itself(pipe, device, file, x, expected):
    """Weights may be saved over the file that they are mapped from: a new file takes its place, and the old one stays mapped."""
    with enable(pipe, device, file):
        assert same(pipe, x, expected)
        pipe.transformer.blocks[2].weight.mul_(2)
        found = pipe(x).cpu()
        save_file(pipe.transformer.state_dict(), file)
        assert same(pipe, x, found)
        assert torch.equal(load_file(file)["blocks.2.weight"], pipe.transformer.blocks[2].weight)
    assert same(pipe, x, found)


def test_the_file_is_removed(pipe, device, file, x, expected):
    """A file that is removed while mapped is there until it is no longer mapped."""
    with enable(pipe, device, file):
        file.unlink()
        assert same(pipe, x, expected)
    assert same(pipe, x, expected)


def _write(file):
    with file.open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\1\2\3\4")


def _cut(file):
    os.truncate(file, 4096)


@pytest.mark.parametrize("change", [_write, _cut])
def test_a_file_that_is_changed_is_noticed(pipe, make, device, file, x, expected, kit, change):
    """A file written to in place is an error by name before its weights are used; disabling gives up everything and says so, once."""
    backend = enable(pipe, device, file)
    assert same(pipe, x, expected)
    os.utime(file, ns=(1, 1))
    with pytest.raises(OffloadStateError, match=r"model\.safetensors was written to while weights of component 'transformer' were mapped"):
        pipe(x)
    change(file)
    with pytest.raises(OffloadStateError, match="the offload is disabled, and its values are uncertain: load it again"):
        backend.disable()
    assert pipe.offload_backend is None
    assert kit.hooks(pipe) == []
    backend.disable()
    pipe.transformer = make().transformer
    with enable(pipe, device):
        assert same(pipe, x, expected)


def test_shutdown_copies_nothing(pipe, device, file, x, expected):
    """A process that ends does not make its weights ordinary memory first, also where the file was changed."""
    backend = enable(pipe, device, file)
    assert same(pipe, x, expected)
    os.utime(file, ns=(1, 1))
    backend.shutdown()
    assert in_file(file, *pipe.transformer.parameters()) == len([*pipe.transformer.parameters()])
    assert same(pipe, x, expected)


def test_shutdown_before_enable(device, file):
    """A backend that never managed anything is shut down like any other."""
    get_offload_backend(config(file), device).shutdown()


# ---- refusals and failures -----------------------------------------------------------------------------------------------------


def _refuse(file):
    (file.parent / "empty").mkdir()
    (file.parent / "model.bin").write_bytes(b"\x80\4.")
    (file.parent / "short.safetensors").write_bytes(file.read_bytes()[:100])
    (file.parent / "none.safetensors").write_bytes(b"")
    (file.parent / "list.json").write_text("[]", encoding="utf-8")
    (file.parent / "index.json").write_text('{"weight_map": {"a": "gone.safetensors", "b": "../up.safetensors"}}', encoding="utf-8")
    header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    raw = json.dumps(header).encode()
    header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    long = json.dumps(header).encode()
    (file.parent / "cut.safetensors").write_bytes(len(long).to_bytes(8, "little") + long + bytes(4))
    (file.parent / "wrong.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "component 'transformer' was to stream from checkpoint '.*gone', which is not there"),
        ("empty", "a folder without safetensors"),
        ("model.bin", "which is no safetensors; pickled weights cannot be mapped"),
        ("short.safetensors", "cannot be read as safetensors .*its header would have"),
        ("none.safetensors", "cannot be read as safetensors .*its header would have 0 bytes"),
        ("wrong.safetensors", r"bytes 0 to 4 for a F32 of shape \[2\]"),
        ("cut.safetensors", r"bytes 0 to 8 for a F32 of shape \[2\], in a file of"),
        ("list.json", "which is no index with a weight_map"),
        ("index.json", r"which names \.\./up\.safetensors, gone\.safetensors: not there beside it"),
    ],
)
def test_a_checkpoint_that_was_asked_for_must_be_there(pipe, device, file, x, expected, whole, name, message):
    """A checkpoint that is no safetensors, or incomplete, is refused by name before anything is touched."""
    _refuse(file)
    with pytest.raises(OffloadConfigError, match=message):
        enable(pipe, device, file.parent / name)
    whole(pipe, x, expected)


def test_a_writer_that_would_write_into_the_file(pipe, device, file, x, expected, whole, monkeypatch):
    """Where what saves over a file would write into it, none is mapped: one that was asked for is refused."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.7.0")
    with pytest.raises(OffloadConfigError, match=r"safetensors 0\.7\.0 writes into the file that it saves over; install 0\.8 or later"):
        enable(pipe, device, file)
    whole(pipe, x, expected)
    remember_files(pipe.transformer, [file])
    with enable(pipe, device) as backend:
        assert same(pipe, x, expected)
        assert told(backend).mapped_bytes == 0
        assert "safetensors 0.7.0 writes into the file" in told(backend).unmapped[0]


def test_without_safetensors_files_are_mapped(pipe, device, file, x, expected, monkeypatch):
    """Nothing of safetensors is needed to map its files."""

    def refuse(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", refuse)
    with enable(pipe, device, file) as backend:
        assert same(pipe, x, expected)
        assert told(backend).mapped_bytes > 0


def test_a_file_that_was_loaded_from_and_is_gone(pipe, device, file, x, expected):
    """The file that a component was loaded from need not be there any more: its weights keep ordinary memory, and the report says so."""
    remember_files(pipe.transformer, [file])
    file.unlink()
    with enable(pipe, device) as backend:
        assert same(pipe, x, expected)
        assert told(backend).mapped_bytes == 0
        assert "cannot be read as safetensors (FileNotFoundError" in told(backend).unmapped[0]


@pytest.mark.parametrize("change", [Path.unlink, _cut])
def test_a_file_that_goes_before_it_is_mapped(pipe, device, file, x, expected, monkeypatch, change):
    """A file that is removed or cut short once its header was read is not mapped."""
    claim = Rotation.claim

    def claim_and_change(self):
        claim(self)
        change(file)

    monkeypatch.setattr(Rotation, "claim", claim_and_change)
    with enable(pipe, device, file) as backend:
        assert same(pipe, x, expected)
        assert any("the file could not be mapped (" in reason for reason in told(backend).unmapped)


def test_a_failure_leaves_nothing_mapped(pipe, device, file, x, expected, whole, monkeypatch):
    """Where enabling fails after weights were mapped, they are ordinary memory again, and the next try maps them."""
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not now"):
        patch.setattr(Rotation, "commit", lambda _: (_ for _ in ()).throw(RuntimeError("not now")))
        enable(pipe, device, file)
    assert in_file(file, *pipe.transformer.parameters()) == 0
    whole(pipe, x, expected)
    with enable(pipe, device, file) as backend:
        assert told(backend).mapped_bytes > 0


_LINES = ("mapped.py", "checkpoint.py", "context.py", "host_memory.py", "host.py", "module.py", "pinned.py")


def _of_mapping(path):
    return "/omni_offload/" in path and path.endswith(_LINES)


@pytest.mark.traced
@pytest.mark.parametrize("step", ["enable", "disable"])
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_interrupts(pipe, device, file, x, expected, whole, chunk, step, stride):
    """After an interrupt at any line of what maps, locks and leaves files, disabling repairs: weights are whole, in ordinary memory."""

    def begin():
        return pipe.enable_omni_offload(config(file, dlo_host_registration_limit_gib=1.0, host_memory=1 << 19), device=device)

    lines = lines_of(begin, _of_mapping)
    ends = lines_of(pipe.disable_omni_offload, _of_mapping)
    for line in (lines if step == "enable" else ends)[::stride]:
        if step == "disable":
            begin()
            pipe(x)
        with contextlib.suppress(Interrupt), interrupted_at(line):
            (begin if step == "enable" else pipe.disable_omni_offload)()
        pipe.disable_omni_offload()
        whole(pipe, x, expected)
        assert in_file(file, *pipe.transformer.parameters()) == 0, line
    with begin() as backend:
        assert same(pipe, x, expected)
        assert told(backend).mapped_bytes > 0


def test_no_room_for_the_staging_ring(pipe, device, file, x, expected, whole):
    """Mapped weights need the staging ring: a limit without room for it is refused, and everything is as it was."""
    with pytest.raises(OffloadConfigError, match="host_memory=1 bytes leaves 1 for the staging ring"):
        enable(pipe, device, file, host_memory=1)
    whole(pipe, x, expected)


# ---- page locking --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def chunk(monkeypatch):
    """Bytes that are locked in one go."""
    monkeypatch.setattr(host_memory, "_LOCKED_CHUNK_BYTES", 8192)
    return 8192


@pytest.mark.parametrize("chunks", [0, 1, 3, 100])
def test_pages_are_locked_up_to_a_limit(pipe, device, file, x, expected, chunk, chunks):
    """As many chunks as the limit holds are locked, and count as pinned; blocks that lie in them only in part are copied in parts."""
    limit = (chunks * chunk + 5) / 2**30
    with enable(pipe, device, file, dlo_host_registration_limit_gib=limit) as backend:
        host = backend._rotation.context.host
        size = file.stat().st_size
        assert sum(one.locked_bytes for one in host._locked) == min(chunks * chunk, size)
        for _ in range(2):
            assert same(pipe, x, expected)
        if chunks == 100:
            assert told(backend).transfer == "overlapped"
        assert sim.pinned_bytes() == backend.report().pinned_host_bytes >= min(chunks * chunk, size)
        assert host.unlocked == ""


def test_what_is_not_locked_is_staged(pipe, device, file, x, expected, chunk, monkeypatch):
    """Within the locked pages copies come from the file, beyond them from the staging ring: all of them from pinned memory."""
    sources = []
    whole = Accelerator.copy

    def note(self, target, source, *, pinned=True):
        sources.append((source.is_pinned(), pinned, in_file(file, source)))
        whole(self, target, source, pinned=pinned)

    with enable(pipe, device, file, dlo_host_registration_limit_gib=2 * chunk / 2**30):
        monkeypatch.setattr(Accelerator, "copy", note)
        assert same(pipe, x, expected)
    assert {*sources} == {(True, True, 0), (True, True, 1)}


def test_locked_pages_count_as_pinned(pipe, device, file, x, expected, chunk):
    """No more is locked than host_memory leaves."""
    with enable(pipe, device, file, dlo_host_registration_limit_gib=1.0, host_memory=2 * chunk + 65536):
        assert same(pipe, x, expected)
        assert sim.pinned_bytes() <= 2 * chunk + 65536
    assert sim.pinned_bytes() == 0


def test_a_device_that_locks_no_pages(pipe, device, file, x, expected, chunk, monkeypatch, caplog):
    """Where the device refuses, weights go through the staging ring, and the report says why."""

    def refuse(*_):
        raise RuntimeError("no more pages")

    monkeypatch.setattr("omni_offload.residency.mapped.Registration", refuse)
    with enable(pipe, device, file, dlo_host_registration_limit_gib=1.0) as backend:
        assert same(pipe, x, expected)
        assert "could not be locked (no more pages)" in told(backend).unmapped[-1]
    assert len(caplog.records) == 1
    assert "its weights go through the staging ring" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pin_cpu_memory": False}, r"dlo_host_registration_limit_gib is 1\.0, and pinning is off; drop one"),
        ({"layer_options": {}}, r"dlo_host_registration_limit_gib is 1\.0, and nothing streams rank-locally"),
    ],
)
def test_a_limit_that_limits_nothing(pipe, device, x, expected, whole, fields, message):
    """A limit of locked pages where none can be locked is refused by name."""
    with pytest.raises(OffloadConfigError, match=message):
        enable(pipe, device, dlo_host_registration_limit_gib=1.0, **fields)
    whole(pipe, x, expected)
