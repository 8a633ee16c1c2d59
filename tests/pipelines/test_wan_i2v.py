"""The hand-written owner: one stage on the device at a time, whatever happens, and the same video as a resident run."""

import copy
import inspect

import diffusers
import pytest
import torch

from omni_offload import ModuleResidency
from omni_offload.errors import OffloadConfigError, OffloadStateError
from pipelines.wan import cases
from pipelines.wan.pipeline_wan_i2v import OmniWanImageToVideoPipeline

CASES = [cases.WAN_2_1_I2V, cases.WAN_2_2_I2V]
KINDS = [None, frozenset({"dit"}), frozenset({"text_encoder", "vae"})]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture
def pipeline(case):
    pipeline = case.make_pipeline()
    yield pipeline
    pipeline.disable_omni_model_cpu_offload()


@pytest.fixture(scope="module")
def resident(device):
    """The video of a pipeline that is on the device as a whole, by case."""
    return {case.name: run(case, case.make_pipeline().to(device)) for case in CASES}


def enable(pipeline, device, *, kinds=None, pin_memory=True):
    pipeline.enable_omni_model_cpu_offload(device=device, pin_memory=pin_memory, use_hsdp=False, offload_components=kinds)


def run(case, pipeline, **changes):
    (video,) = case.outputs(pipeline(**{**case.make_inputs(pipeline), **changes}))
    return video.cpu()


def parts(pipeline):
    """What comes and goes, by name."""
    components = {name: c for name, c in pipeline.components.items() if isinstance(c, torch.nn.Module)}
    vae = components.pop("vae")
    return {**components, **{f"vae.{name}": child for name, child in vae.named_children()}}


def tensors(pipeline):
    return {
        f"{part}.{name}": tensor
        for part, module in parts(pipeline).items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def on_device(pipeline):
    return {
        part
        for part, module in parts(pipeline).items()
        if any(tensor.device.type != "cpu" for tensor in (*module.parameters(), *module.buffers()))
    }


def watch(pipeline):
    """Return a list that gets, whenever a part runs, its name and what is on the device."""
    seen = []
    for part, module in parts(pipeline).items():
        first = module.blocks[0] if part.startswith("transformer") else getattr(module, "encoder", module)
        first.register_forward_pre_hook(lambda *_, part=part: seen.append((part, frozenset(on_device(pipeline)))))
    return seen


def snapshot(pipeline):
    """Objects, places and values of all weights, and what is in the modules' own dictionaries."""
    weights = {name: (id(t), t.device, t.cpu().clone()) for name, t in tensors(pipeline).items()}
    return weights, [sorted(module.__dict__) for part in parts(pipeline).values() for module in part.modules()]


def assert_same(before, after):
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    for name, (identity, device, value) in before[0].items():
        assert after[0][name][:2] == (identity, device), name
        assert torch.equal(after[0][name][2], value), name


class BoomError(Exception): ...


def failing(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


def test_signatures_are_upstream():
    """Overrides keep the upstream signature."""
    upstream = diffusers.WanImageToVideoPipeline
    for name in ("__call__", "encode_prompt", "encode_image"):
        ours = inspect.signature(getattr(OmniWanImageToVideoPipeline, name))
        assert ours == inspect.signature(getattr(upstream, name))


def test_runs_as_upstream_while_not_enabled(case, pipeline):
    """Without offload it is the upstream pipeline."""
    upstream = diffusers.WanImageToVideoPipeline(**case.make_pipeline().components, **_config(pipeline))
    upstream.set_progress_bar_config(disable=True)
    assert torch.equal(run(case, pipeline), run(case, upstream))


def _config(pipeline):
    return {key: pipeline.config[key] for key in ("boundary_ratio", "expand_timesteps")}


def test_decode_latent_on_the_host(case, pipeline):
    """Latents that a call returned decode to the video that it would have returned."""
    latents = pipeline(**{**case.make_inputs(pipeline), "output_type": "latent"}).frames
    assert torch.equal(pipeline.decode_latent(latents, output_type="pt"), run(case, pipeline))


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("kinds", KINDS, ids=["all", "dit", "text_encoder+vae"])
def test_same_video_as_resident(case, pipeline, resident, device, kinds, pin_memory):
    """Calls are bit-equal to a resident run, and again after disable on the host."""
    expected_on_host = run(case, pipeline)
    before = snapshot(pipeline)
    enable(pipeline, device, kinds=kinds, pin_memory=pin_memory)
    for _ in range(2):
        assert torch.equal(run(case, pipeline), resident[case.name])
    pipeline.disable_omni_model_cpu_offload()
    assert_same(before, snapshot(pipeline))
    assert torch.equal(run(case, pipeline), expected_on_host)


def test_one_stage_at_a_time(pipeline, case, device):
    """Whichever part runs, only its stage is on the device; the halves of the VAE are stages of their own."""
    enable(pipeline, device)
    seen = watch(pipeline)
    run(case, pipeline)
    halves = {
        "vae.encoder": {"vae.encoder", "vae.quant_conv"},
        "vae.quant_conv": {"vae.encoder", "vae.quant_conv"},
        "vae.decoder": {"vae.decoder", "vae.post_quant_conv"},
        "vae.post_quant_conv": {"vae.decoder", "vae.post_quant_conv"},
    }
    assert {part for part, _ in seen} == set(parts(pipeline))
    for part, there in seen:
        assert there == halves.get(part, {part})
    assert not on_device(pipeline)


def test_unselected_kinds_stay(pipeline, case, device):
    """Components of other kinds are on the device while enabled, between calls too, and on the host afterwards."""
    enable(pipeline, device, kinds=frozenset({"dit"}))
    dits = {part for part in parts(pipeline) if part.startswith("transformer")}
    others = set(parts(pipeline)) - dits
    assert on_device(pipeline) == others
    run(case, pipeline)
    assert on_device(pipeline) == others
    pipeline.disable_omni_model_cpu_offload()
    assert not on_device(pipeline)


def test_what_was_written_on_the_device_is_kept(pipeline, device):
    """Weights edited on the device are edited after disable."""
    enable(pipeline, device, kinds=frozenset({"dit"}))
    weight = pipeline.text_encoder.shared.weight
    with torch.no_grad():
        weight.fill_(3.0)
    weight.data.add_(1.0)
    pipeline.disable_omni_model_cpu_offload()
    assert weight.device.type == "cpu"
    assert (weight == 4.0).all()


def test_edits_between_calls_are_in_force(pipeline, case, device):
    """Weights edited on the host between two calls are used by the second."""
    enable(pipeline, device)
    first = run(case, pipeline)
    pipeline.transformer.proj_out.weight.data.mul_(2.0)
    other = case.make_pipeline()
    other.transformer.proj_out.weight.data.mul_(2.0)
    second = run(case, pipeline)
    assert not torch.equal(first, second)
    assert torch.equal(second, run(case, other.to(device)))


@pytest.mark.parametrize("make_error", [BoomError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("place", ["text_encoder", "transformer", "vae.encoder", "vae.decoder"])
def test_a_failing_call_leaves_nothing_behind(pipeline, case, resident, device, place, make_error):
    """An error passes as it is; nothing stays on the device, features of the VAE included; the next call is right."""
    enable(pipeline, device)
    error = make_error()
    handle = parts(pipeline)[place].register_forward_hook(failing(error))
    with pytest.raises(type(error)) as info:
        run(case, pipeline)
    assert info.value is error
    assert not on_device(pipeline)
    assert not any(isinstance(item, torch.Tensor) for item in pipeline.vae._feat_map) if place == "vae.decoder" else True
    handle.remove()
    assert torch.equal(run(case, pipeline), resident[case.name])


def test_an_error_between_stages(pipeline, case, resident, device):
    """An error of the user's callback passes; the next call is right."""
    enable(pipeline, device)
    error = BoomError()
    with pytest.raises(BoomError) as info:
        run(case, pipeline, callback_on_step_end=failing(error))
    assert info.value is error
    assert not on_device(pipeline)
    assert torch.equal(run(case, pipeline), resident[case.name])


def test_a_component_outside_a_call(pipeline, device):
    """A component that is used on its own is on the device only while it works; inputs are brought to it every time."""
    enable(pipeline, device)
    seen = watch(pipeline)
    ids = torch.ones(1, 4, dtype=torch.long)
    for _ in range(2):
        with torch.no_grad():
            states = pipeline.text_encoder(ids, attention_mask=ids).last_hidden_state
        assert states.device == pipeline._execution_device
        assert not on_device(pipeline)
    assert seen == [("text_encoder", {"text_encoder"})] * 2


def test_encoding_is_a_call(pipeline, case, device):
    """Encoding prompts on its own frees the device once, at its end."""
    enable(pipeline, device)
    loads = []
    load = ModuleResidency.load
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(ModuleResidency, "load", lambda self: (loads.append(self.fetched), load(self))[1])
        pipeline.encode_prompt("a red cat", "blurry", max_sequence_length=32)
        assert loads == [False, True]
        if pipeline.image_encoder is not None:
            pipeline.encode_image(case.make_inputs(pipeline)["image"])
    assert not on_device(pipeline)


def test_decode_latent_while_enabled(case, pipeline, resident, device):
    """Latents from anywhere are decoded on the device, by the decoder alone."""
    enable(pipeline, device)
    latents = pipeline(**{**case.make_inputs(pipeline), "output_type": "latent"}).frames
    seen = watch(pipeline)
    for source in (latents, latents.cpu()):
        video = pipeline.decode_latent(source, output_type="pt")
        assert video.device == pipeline._execution_device
        assert torch.equal(video.cpu(), resident[case.name])
    assert {part for part, _ in seen} == {"vae.post_quant_conv", "vae.decoder"}
    assert not on_device(pipeline)


def test_stages_by_hand(pipeline, device):
    """A stage nests with itself and with others; it leaves with the outermost body, however that ends."""
    enable(pipeline, device)
    with pytest.raises(BoomError), pipeline._stage("transformer"):
        with pipeline._stage("transformer"):
            assert on_device(pipeline) == {"transformer"}
        with pipeline._stage("vae_decoder"):
            assert on_device(pipeline) == {"transformer", "vae.decoder", "vae.post_quant_conv"}
        assert on_device(pipeline) == {"transformer"}
        raise BoomError
    assert not on_device(pipeline)
    with pytest.raises(OffloadStateError, match="there is no stage 'unet'; this pipeline has: text_encoder"):
        pipeline._stage("unet").__enter__()


def test_stages_do_nothing_while_not_enabled(pipeline):
    """Code that names stages runs without offload too."""
    with pipeline._stage("transformer"):
        assert not on_device(pipeline)


def test_autograd_is_refused(pipeline, device):
    """A rotating component is refused where autograd would record; a resident one and inference mode are not."""
    enable(pipeline, device, kinds=frozenset({"text_encoder"}))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(OffloadStateError, match=r"autograd would record .*call it under torch\.no_grad"):
        pipeline.text_encoder(ids)
    assert "text_encoder" not in on_device(pipeline)
    pipeline.vae.decode(torch.zeros(1, 4, 1, 4, 4))
    with torch.inference_mode():
        pipeline.text_encoder(ids)


def test_enable_again(pipeline, device):
    """An equal request changes nothing; another is refused and changes nothing either."""
    backend = pipeline.enable_omni_offload(device=device)
    staging = pipeline._staging
    assert pipeline.enable_omni_offload("module", device=device) is backend
    for changes in ({"kinds": frozenset({"dit"})}, {"pin_memory": False}):
        with pytest.raises(OffloadStateError, match="disable_omni_model_cpu_offload"):
            enable(pipeline, device, **changes)
    assert pipeline._staging is staging


def test_disable_is_idempotent(pipeline, device):
    """Disabling twice, or what was never enabled, does nothing; enabling again works."""
    before = snapshot(pipeline)
    pipeline.disable_omni_model_cpu_offload()
    for _ in range(2):
        enable(pipeline, device)
        pipeline.disable_omni_model_cpu_offload()
        pipeline.disable_omni_model_cpu_offload()
        assert_same(before, snapshot(pipeline))


def test_bad_requests(pipeline, device):
    """Unknown kinds, a device that is none, a byte budget and nothing to offload are refused before anything moves."""
    before = snapshot(pipeline)
    with pytest.raises(OffloadConfigError, match="'unet'"):
        enable(pipeline, device, kinds=frozenset({"unet", "dit"}))
    with pytest.raises(OffloadStateError, match="on the host already"):
        enable(pipeline, torch.device("cpu"))
    with pytest.raises(OffloadConfigError, match="drives its model-level offload"):
        pipeline.enable_omni_offload(device=device, device_memory="1GiB")
    assert_same(before, snapshot(pipeline))
    pipeline.text_encoder = torch.nn.Identity()
    with pytest.raises(OffloadConfigError):
        enable(pipeline, device, kinds=frozenset({"text_encoder"}))
    assert pipeline._staging is None


def test_a_vae_with_other_weights_is_refused(pipeline, device):
    """Weights of the VAE that no stage would move are named."""
    pipeline.vae.register_buffer("scale", torch.ones(1))
    with pytest.raises(OffloadConfigError, match="AutoencoderKLWan holds weights that are in neither half of it: scale"):
        enable(pipeline, device)


def test_missing_components_are_left_out(device):
    """A pipeline without DiTs still encodes and decodes."""
    case = cases.WAN_2_2_I2V
    pipeline = case.make_pipeline()
    pipeline.transformer_2 = None
    enable(pipeline, device)
    assert pipeline.image_encoder is None
    pipeline.decode_latent(torch.zeros(1, 4, 1, 4, 4))
    pipeline.disable_omni_model_cpu_offload()


def test_a_component_replaced_while_enabled(pipeline, case, device):
    """A call is refused that would run a component which offload does not know."""
    enable(pipeline, device)
    kept, pipeline.transformer = pipeline.transformer, case.make_pipeline().transformer
    with pytest.raises(OffloadStateError, match=r"'transformer' .* was replaced while offload is enabled"):
        run(case, pipeline)
    pipeline.transformer = kept
    run(case, pipeline)


def test_a_component_of_another_owner(pipeline, case, device):
    """A component that another pipeline manages is refused, and nothing of this one is touched."""
    other = case.make_pipeline()
    other.register_modules(text_encoder=pipeline.text_encoder)
    enable(pipeline, device)
    before = snapshot(other)
    with pytest.raises(OffloadStateError, match="managed by another"):
        enable(other, device)
    assert_same(before, snapshot(other))
    assert other._staging is None


@pytest.mark.parametrize("found", ["host", "device"])
@pytest.mark.parametrize("make_error", [BoomError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["prepare", "load", "register_hook"])
def test_enable_is_all_or_nothing(pipeline, case, device, step, make_error, found):
    """An error at any step of enabling leaves weights, places, objects and modules as they were; enabling works then."""
    if found == "device":
        pipeline.to(device)
    before, error = snapshot(pipeline), make_error()
    owner = __import__("omni_offload").HookRegistry if step == "register_hook" else ModuleResidency
    original, calls = getattr(owner, step), []

    def fail_on_the_third(*args, **kwargs):
        calls.append(step)
        if len(calls) == 3:
            raise error
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, step, fail_on_the_third)
        with pytest.raises(type(error)) as info:
            enable(pipeline, device, kinds=frozenset({"dit"}))
    assert info.value is error
    assert_same(before, snapshot(pipeline))
    enable(pipeline, device)
    assert torch.isfinite(run(case, pipeline)).all()


def test_weights_found_on_the_device(pipeline, case, resident, device):
    """A pipeline that is on the device is brought to the host when offload is enabled."""
    pipeline.to(device)
    enable(pipeline, device)
    assert not on_device(pipeline)
    assert torch.equal(run(case, pipeline), resident[case.name])


def test_every_cleanup_step_runs(pipeline, case, device, caplog):
    """Where one stage cannot leave, the others do; the error is raised, or noted on the error of the call."""
    enable(pipeline, device)
    offload, failed = ModuleResidency.offload, BoomError("cannot leave")

    def fail_for_the_decoder(self):
        offload(self)
        if self is pipeline._staging._stages["vae_decoder"].residency:
            raise failed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleResidency, "offload", fail_for_the_decoder)
        with pytest.raises(BoomError) as info, pipeline._call():
            pass
        assert info.value is failed
        with pytest.raises(ZeroDivisionError) as info, pipeline._call():
            raise ZeroDivisionError
        assert any("cannot leave" in note for note in info.value.__notes__)
        with pytest.raises(BoomError), pipeline._stage("transformer"):
            pass
    assert not on_device(pipeline)
    assert "cannot leave" in caplog.text
    run(case, pipeline)


def test_disable_runs_every_step(pipeline, device):
    """Where restoring fails, every stage is tried all the same, and disabling once more finishes it."""
    before = snapshot(pipeline)
    enable(pipeline, device)
    restore = ModuleResidency.restore

    def fail(self, **kwargs):
        restore(self, **kwargs)
        raise BoomError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleResidency, "restore", fail)
        with pytest.raises(BoomError):
            pipeline.disable_omni_model_cpu_offload()
    assert_same(before, snapshot(pipeline))
    pipeline.disable_omni_model_cpu_offload()
    assert pipeline._staging is None


def test_a_copy_is_not_enabled(pipeline, case, resident, device):
    """A deep copy of an enabled pipeline is one that is not enabled, on the host."""
    enable(pipeline, device)
    made = copy.deepcopy(pipeline)
    assert made._staging is None
    assert not on_device(made)
    assert torch.equal(run(case, pipeline), resident[case.name])
    assert torch.isfinite(run(case, made)).all()


def test_tiles_are_one_piece_of_work(pipeline, case, device):
    """A decode in many tiles loads the decoder once, and equals the tiled decode of a resident run."""
    tiles = dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), 16)
    strides = dict.fromkeys(("tile_sample_stride_height", "tile_sample_stride_width"), 8)
    whole = case.make_pipeline().to(device)
    for one in (pipeline, whole):
        one.vae.enable_tiling(**tiles, **strides)
    enable(pipeline, device)
    assert torch.equal(run(case, pipeline), run(case, whole))
    report = {row.name: row for row in pipeline.offload_report.components}
    assert report["vae_decoder"].loads == report["vae_encoder"].loads == 1


@pytest.mark.parametrize("kinds", KINDS, ids=["all", "dit", "text_encoder+vae"])
def test_release_between_uses(pipeline, case, resident, device, kinds):
    """The backend frees and refreshes what the stages hold between uses; what stays remains, and the next call is right."""
    enable(pipeline, device, kinds=kinds)
    backend = pipeline.offload_backend

    seen = []

    def release(pipe, step, timestep, tensors):
        seen.append(held())
        backend.release()
        seen.append(held())
        return tensors

    def held():
        return {c.name for c in backend.report().components if c.resident_bytes}

    staying = held()
    result = pipeline(**case.make_inputs(pipeline), callback_on_step_end=release)
    assert torch.equal(case.outputs(result)[0].cpu(), resident[case.name])
    assert seen[0] > staying or kinds == {"text_encoder", "vae"}
    assert seen[1::2] == [staying] * (len(seen) // 2)
    backend.refresh()
    assert torch.equal(run(case, pipeline), resident[case.name])
