"""`save_pretrained` while enabled: what plain diffusers and this package load is the pipeline as it would be without offload."""

import json

import diffusers
import pytest
import torch

import pipelines
from omni_offload.backends import owns_its_offload
from tests.saving.conftest import LOADED_OTHERWISE, NOT_LOADED, NOT_SAVED, every_case

NOT_THE_SAME = (*NOT_SAVED, *NOT_LOADED, *LOADED_OTHERWISE)

STATES = ["enabled", "between calls", "kept", "failed", "staying", "disabled", "streaming", "streaming kept", "streaming failed"]
"""What the pipeline is in when it is saved."""

KEYS = {
    "kept": {"keep_between_calls": True},
    "staying": {"components": ["dit"]},
    "streaming": {"config": "layer"},
    "streaming kept": {"config": "layer", "slots": 2, "keep_between_calls": True},
    "streaming failed": {"config": "layer"},
}
"""What is asked for in each."""

FAST_STATES = ("enabled",)

CAST_AFTER_USE = ("sdxl_fp16", "sdxl_img2img_fp16")
"""Cases of which nothing is kept: upstream casts the VAE, which is used last, back to the type that it had."""

LATER = {"stable_diffusion_unclip": "unet"}
"""Cases whose first denoiser runs before the last tokenizer, and the one that runs after it."""


class StopError(Exception):
    """Ends a call in its midst."""


def _fail(pipeline, case):
    """Let a call fail where the first denoiser runs, or where there is none, the last encoder: tokenizers save how they were used last."""
    name = [*pipeline._dit_modules, *reversed(pipeline._encoder_modules)][0]
    handle = getattr(pipeline, LATER.get(case.name, name)).register_forward_hook(_stop)
    with pytest.raises(StopError):
        pipeline(**case.make_inputs(pipeline))
    handle.remove()


def _stop(*_):
    raise StopError


def _bring(case, state, kit):
    """Return a pipeline in a state."""
    pipeline = kit.aligned(case.make_pipeline())
    if state == "enabled":
        kit.call(case, pipeline)
    keys = KEYS.get(state, {}) if pipeline._dit_modules or state != "staying" else {}
    backend = pipeline.enable_omni_offload(device="sim", **keys)
    if state.endswith("failed"):
        _fail(pipeline, case)
    elif state != "enabled":
        kit.call(case, pipeline)
    if state.endswith("kept") and not (case.name in CAST_AFTER_USE or (state == "kept" and owns_its_offload(pipeline))):
        assert sum(part.resident_bytes for part in backend.report().components) > 0
    if state == "disabled":
        pipeline.disable_omni_offload()
        kit.at_home(case, pipeline)
    return pipeline


@pytest.mark.parametrize("state", [pytest.param(state, marks=() if state in FAST_STATES else pytest.mark.exhaustive) for state in STATES])
@pytest.mark.parametrize("case", every_case(but=NOT_SAVED))
def test_the_files_are_those_of_a_pipeline_that_was_never_enabled(case, state, kit, reference, tmp_path):
    """Byte for byte, whatever state the components are in; the next call is right, and disabling leaves nothing."""
    wanted, outputs = reference(case, tmp_path / "wanted")
    pipeline = _bring(case, state, kit)
    pipeline.save_pretrained(tmp_path / "ours")
    found = kit.files(tmp_path / "ours")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert kit.same(kit.call(case, pipeline), outputs)
    pipeline.disable_omni_offload()


def test_the_files_of_a_pipeline_that_streams(flux, kit, reference, tmp_path):
    """One case of the above that is always tried: residents and blocks that were fetched ahead are on the device."""
    wanted, outputs = reference(flux, tmp_path / "wanted")
    pipeline = _bring(flux, "streaming kept", kit)
    pipeline.save_pretrained(tmp_path / "ours")
    assert kit.files(tmp_path / "ours") == wanted
    assert kit.same(kit.call(flux, pipeline), outputs)
    pipeline.disable_omni_offload()


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in every_case() if case.id in NOT_THE_SAME])
def test_what_upstream_cannot(case, kit, tmp_path):
    """The cases that are left out here fail in plain diffusers, without any offload, as they are said to."""
    pipeline = case.make_pipeline()
    if case.name in NOT_SAVED:
        with pytest.raises(AttributeError, match=NOT_SAVED[case.name]):
            pipeline.save_pretrained(tmp_path)
        return
    pipeline.save_pretrained(tmp_path)
    if case.name in LOADED_OTHERWISE:
        loaded = kit.aligned(diffusers.DiffusionPipeline.from_pretrained(tmp_path, local_files_only=True))
        assert not kit.same(kit.call(case, loaded), kit.call(case, pipeline))
        return
    with pytest.raises((AttributeError, ImportError, NotImplementedError, TypeError, ValueError), match=NOT_LOADED[case.name]):
        kit.call(case, diffusers.DiffusionPipeline.from_pretrained(tmp_path, local_files_only=True))


def test_what_is_left_out_is_what_the_contract_expects_to_fail():
    """The cases that are left out here are those in which the contract's check of a saved folder is expected to fail."""
    assert {case.id for case in every_case() if "check_save_pretrained" in case.values[0].expected_failures} == set(NOT_THE_SAME)


@pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated:FutureWarning")  # upstream's Stable Diffusion XL says it of its own call
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # Chroma and Flux' ControlNet are made with it
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # Stable Audio's VAE is made with it
@pytest.mark.parametrize("case", every_case(but=NOT_THE_SAME))
def test_what_was_saved_while_enabled_is_loaded_by_both(case, kit, reference, tmp_path):
    """Plain diffusers makes the upstream class of it, this package its own; both give the outputs of the pipeline that was saved."""
    _, outputs = reference(case, tmp_path / "wanted")
    pipeline = kit.aligned(case.make_pipeline())
    with pipeline.enable_omni_offload(device="sim"):
        kit.call(case, pipeline)
        pipeline.save_pretrained(tmp_path / "ours")
    index = json.loads((tmp_path / "ours" / "model_index.json").read_text(encoding="utf-8"))
    upstream = getattr(diffusers, type(pipeline).__name__.removeprefix("Omni"))
    assert index["_class_name"] == upstream.__name__
    dtypes = {p.dtype for module in kit.modules(pipeline).values() for p in module.parameters()}
    keys = {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    plain = kit.aligned(diffusers.DiffusionPipeline.from_pretrained(tmp_path / "ours", local_files_only=True, **keys))
    assert type(plain) is upstream
    assert kit.same(kit.call(case, plain), outputs)
    ours = kit.aligned(pipelines.from_pretrained(tmp_path / "ours", **keys))
    assert type(ours) is type(pipeline)
    for mode in ("module", "layer"):
        with ours.enable_omni_offload(mode, device="sim"):
            assert kit.same(kit.call(case, ours), outputs)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        ({"safe_serialization": False}, None),
        ({"variant": "odd"}, {"variant": "odd"}),
        ({"max_shard_size": "300KB"}, {}),
        ({"max_shard_size": 200_000, "variant": "odd"}, {"variant": "odd"}),
    ],
    ids=["pickled", "variant", "sharded", "sharded variant"],
)
def test_every_form_of_files(flux, kit, tmp_path, save, load):
    """Pickled files, a variant and shards are the ones of a pipeline that was never enabled, and are loaded by both, but for pickles."""
    plain = kit.aligned(flux.make_pipeline())
    kit.call(flux, plain)
    plain.save_pretrained(tmp_path / "wanted", **save)
    pipeline = kit.aligned(flux.make_pipeline())
    with pipeline.enable_omni_offload(device="sim", keep_between_calls=True):
        kit.call(flux, pipeline)
        pipeline.save_pretrained(tmp_path / "ours", **save)
    wanted, found = kit.files(tmp_path / "wanted"), kit.files(tmp_path / "ours")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert ("max_shard_size" in save) is any("-of-0000" in name for name in found)
    loaders = [diffusers.DiffusionPipeline, pipelines]
    if load is None:
        with pytest.raises(pipelines.PipelineLookupError, match=r"vae/diffusion_pytorch_model\.bin: pickles run code"):
            loaders.pop().from_pretrained(tmp_path / "ours")
    for loaded in (loader.from_pretrained(tmp_path / "ours", **(load or {})) for loader in loaders):
        assert all(torch.equal(tensor, kit.tensors(loaded)[name]) for name, tensor in kit.tensors(plain).items())


@pytest.mark.parametrize("keyword", ["torch_dtype", "dtype"])
def test_a_type_is_asked_for_as_diffusers_asks(flux, kit, tmp_path, keyword):
    """Both keywords of the upstream loader reach it, and what is loaded in bf16 runs offloaded in bf16."""
    flux.make_pipeline().save_pretrained(tmp_path)
    loaded = kit.aligned(pipelines.from_pretrained(tmp_path, **{keyword: torch.bfloat16}))
    assert {tensor.dtype for tensor in kit.tensors(loaded).values() if tensor.is_floating_point()} == {torch.bfloat16}
    wanted = kit.call(flux, loaded)
    with loaded.enable_omni_offload(device="sim"):
        assert kit.same(kit.call(flux, loaded), wanted)
        loaded.save_pretrained(tmp_path / "again")
    again = pipelines.from_pretrained(tmp_path / "again", **{keyword: torch.bfloat16})
    assert all(torch.equal(tensor, kit.tensors(again)[name]) for name, tensor in kit.tensors(loaded).items())


def test_a_cast_while_enabled_is_what_is_saved(flux, kit, tmp_path):
    """A component that was cast between calls is saved in its new type."""
    pipeline = kit.aligned(flux.make_pipeline())
    with pipeline.enable_omni_offload(device="sim", keep_between_calls=True):
        kit.call(flux, pipeline)
        pipeline.vae.to(torch.float16)
        pipeline.save_pretrained(tmp_path)
    assert diffusers.AutoencoderKL.from_pretrained(tmp_path, subfolder="vae", torch_dtype="auto").dtype in (torch.float16, torch.float32)
    from safetensors.torch import load_file

    (file,) = (tmp_path / "vae").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float16}


def test_an_edit_while_enabled_is_what_is_saved(flux, kit, tmp_path):
    """A weight that was written in place, on the host or on the device, is saved with its new value."""
    pipeline = kit.aligned(flux.make_pipeline())
    with pipeline.enable_omni_offload(device="sim", keep_between_calls=True), torch.no_grad():
        kit.call(flux, pipeline)
        pipeline.vae.decoder.conv_out.bias.fill_(0.25)
        with pipeline.on_device("transformer"):
            pipeline.transformer.proj_out.bias.fill_(0.5)
            assert pipeline.transformer.proj_out.bias.device.type == "sim"
        pipeline.save_pretrained(tmp_path)
    loaded = diffusers.FluxPipeline.from_pretrained(tmp_path)
    assert loaded.vae.decoder.conv_out.bias.eq(0.25).all()
    assert loaded.transformer.proj_out.bias.eq(0.5).all()
