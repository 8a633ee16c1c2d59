"""Real pipelines whose blocks stream from the files that they were loaded from."""

import json
from pathlib import Path

import pytest
import torch

import pipelines
from omni_offload import LayerOptions, OffloadConfig, OffloadStrategy

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc, as Linux has it")

LOCAL = LayerOptions(weight_transfer="rank-local")
CONFIG = OffloadConfig(
    strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE, layer_options={"dit": LOCAL, "text_encoder": LOCAL}, host_memory=64 << 20
)


def mapped():
    """The names of the files that are mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if "safetensors" in line}


def outputs(case, pipe):
    with torch.no_grad():
        return [output.cpu() for output in case.outputs(pipe(**case.make_inputs(pipe)))]


def equal(found, expected):
    return all(map(torch.equal, found, expected))


def parts(backend):
    return {part.name: part for part in backend.report().components if part.treatment == "stream"}


@pytest.mark.parametrize(
    "name",
    ["flux", *(pytest.param(other, marks=pytest.mark.exhaustive) for other in ("wan", "qwen_image", "sd3", "cogvideox"))],
)
def test_loaded_and_mapped(name, device, tmp_path):
    """What streams lies in the files of its folder, sharded ones too, and the outputs are those of a resident run; it may be saved there."""
    case = pipelines.registered()[name].load_cases()[0]
    case.make_pipeline().save_pretrained(tmp_path, max_shard_size="300KB")
    plain = pipelines.from_pretrained(tmp_path)
    assert plain.__class__ is case.make_pipeline().__class__
    want = outputs(case, plain.to(device))
    del plain
    pipe = pipelines.from_pretrained(tmp_path)
    for _ in range(2):
        with pipe.enable_omni_offload(CONFIG, device=device) as backend:
            assert equal(outputs(case, pipe), want)
            for part in parts(backend).values():
                saved = sum(parameter.nbytes for parameter in getattr(pipe, part.name).parameters())
                assert part.mapped_bytes >= 0.95 * saved, str(backend.report())
                assert all(line.endswith(": not in the file") for line in part.unmapped), str(backend.report())
            assert mapped()
            pipe.save_pretrained(tmp_path, max_shard_size="300KB")
            assert equal(outputs(case, pipe), want)
    assert equal(outputs(case, pipelines.from_pretrained(tmp_path).to(device)), want)


@pytest.fixture
def flux():
    return pipelines.registered()["flux"].load_cases()[0]


def test_a_fused_adapter_is_not_mapped(flux, device, tmp_path):
    """Weights with an adapter fused into them, before or while offload is enabled, never reach the file, nor lie in it as it is."""
    from peft import LoraConfig

    flux.make_pipeline().save_pretrained(tmp_path)
    files = {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
    pipe = pipelines.from_pretrained(tmp_path)
    torch.manual_seed(1)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe.fuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    fused = {name: weight.clone() for name, weight in pipe.transformer.named_parameters() if "to_q" in name and "weight" in name}
    want = outputs(flux, pipe)
    with pipe.enable_omni_offload(CONFIG, device=device) as backend:
        assert equal(outputs(flux, pipe), want)
        assert any("to_q" in line and "other values than the file's" in line for line in parts(backend)["transformer"].unmapped)
        assert parts(backend)["transformer"].mapped_bytes > 0
        weights = dict(pipe.transformer.named_parameters())
        assert all(torch.equal(weights[name], weight) for name, weight in fused.items())
    assert {file: file.read_bytes() for file in files} == files
    pipe = pipelines.from_pretrained(tmp_path)
    torch.manual_seed(1)
    with pipe.enable_omni_offload(CONFIG, device=device):
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
        pipe.fuse_lora(components=["transformer"])
        assert equal(outputs(flux, pipe), want)
        assert {file: file.read_bytes() for file in files} == files
    assert equal(outputs(flux, pipe), want)


def test_which_files_are_remembered(flux, device, tmp_path):
    """The files are those of the variant that was loaded; a component that was given was loaded from none."""
    flux.make_pipeline().save_pretrained(tmp_path, variant="fp16", max_shard_size="300KB")
    given = flux.make_pipeline().text_encoder_2
    pipe = pipelines.from_pretrained(tmp_path, variant="fp16", text_encoder_2=given)
    with pipe.enable_omni_offload(CONFIG, device=device) as backend:
        found = parts(backend)
        assert found["transformer"].mapped_bytes > 0
        assert (found["text_encoder_2"].mapped_bytes, found["text_encoder_2"].unmapped) == (0, ())
        names = json.loads(next((tmp_path / "transformer").glob("*.index.fp16.json")).read_text(encoding="utf-8"))["weight_map"].values()
        assert {*names} <= mapped()


def test_a_cast_pipeline_is_not_mapped(flux, device, tmp_path):
    """Weights that were loaded as another type than the file's have memory of their own, and the report says why."""
    flux.make_pipeline().save_pretrained(tmp_path)
    pipe = pipelines.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with pipe.enable_omni_offload(CONFIG, device=device) as backend:
        part = parts(backend)["transformer"]
        assert part.mapped_bytes == 0
        assert any("and others: of another type or shape in the file" in line for line in part.unmapped)
