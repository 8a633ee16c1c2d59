"""What is special in Stable Diffusion: what alternates, what runs before the UNet and after the VAE, and what comes while enabled."""

import diffusers
import pytest
import torch
from pipeline_runs import loads, on_device, parts, run, same
from safetensors.torch import save_file

import pipelines
from omni_offload import OffloadConfig, OffloadStrategy, resolve_offload_plan
from omni_offload.testing import sim
from pipelines.stable_diffusion import cases
from pipelines.tiny.components import clip_image_processor, clip_text_encoder, clip_vision_encoder
from pipelines.tiny.inputs import picture
from pipelines.tiny.seeding import seeded
from pipelines.tiny.unets import control_net, ip_adapter, unet_2d

CASES = [getattr(cases, name) for name in cases.__all__]
LAYERWISE = OffloadConfig(strategy=OffloadStrategy.LAYERWISE)


def resident(case, device, setup=lambda _: None, **changes):
    """What a pipeline gives that is on the device as a whole."""
    pipeline = case.make_pipeline().to(device)
    setup(pipeline)
    return run(case, pipeline, **changes)


def watch(pipeline, *paths):
    """Return a list that gets, whenever one of some modules runs, its path and the components that are on the device."""
    seen = []
    for path in paths:
        module = pipeline.components[path.partition(".")[0]].get_submodule(path.partition(".")[2])
        module.register_forward_pre_hook(lambda *_, path=path: seen.append((path, on_device(pipeline))))
    return seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_device_smaller_than_the_weights(case, device):
    """Where the device holds less than all weights, two calls equal a resident run, and no component is loaded twice in a call."""
    changes = {"height": 16, "width": 16} if case in (cases.SAFETY_CHECKER, cases.TINY_AUTOENCODER) else {}  # less beside the weights
    expected = resident(case, device, **changes)
    pipeline = case.make_pipeline()
    weights = sum(t.nbytes for part in parts(pipeline).values() for t in (*part.parameters(), *part.buffers()))
    with pipeline.enable_omni_offload(device=device):
        with sim.settings(capacity=sim.allocated() + int(0.95 * weights)):
            assert same(run(case, pipeline, **changes), expected)
            assert same(run(case, pipeline, **changes), expected)
        twice = {"vae"} if case in (cases.IMG2IMG, cases.INPAINT) else set()
        assert loads(pipeline) == {name: 4 if name in twice else 2 for name in parts(pipeline)}
    assert not on_device(pipeline)


@pytest.mark.parametrize("case", [cases.CONTROLNET, cases.MULTI_CONTROLNET], ids=lambda case: case.name)
def test_controlnets_stay_beside_the_unet(case, device):
    """ControlNets and UNet alternate in each step and are loaded once for all of them."""
    pipeline = case.make_pipeline()
    nets = [f"controlnet.nets.{index}.conv_in" for index in range(2)] if case is cases.MULTI_CONTROLNET else ["controlnet.conv_in"]
    with pipeline.enable_omni_offload(device=device):
        seen = watch(pipeline, *nets, "unet.conv_in")
        run(case, pipeline, num_inference_steps=4)
        assert loads(pipeline) == {"text_encoder": 1, "controlnet": 1, "unet": 1, "vae": 1}
    assert [path for path, _ in seen] == [*nets, "unet.conv_in"] * 4


@pytest.mark.parametrize("case", [cases.IMG2IMG, cases.INPAINT], ids=lambda case: case.name)
def test_pictures_are_encoded_before_the_unet(case, device):
    """The VAE's encoder runs before the UNet and its decoder after it; each has the device for itself."""
    pipeline = case.make_pipeline()
    with pipeline.enable_omni_offload(device=device):
        seen = watch(pipeline, "text_encoder.encoder.layers.0", "vae.encoder.conv_in", "unet.conv_in", "vae.decoder.conv_in")
        run(case, pipeline)
    order = list(dict.fromkeys(path for path, _ in seen))
    assert order == ["text_encoder.encoder.layers.0", "vae.encoder.conv_in", "unet.conv_in", "vae.decoder.conv_in"]
    assert all(there == {path.partition(".")[0]} for path, there in seen)


def test_the_safety_checker_rotates(device):
    """The safety checker has the device for itself after the VAE, and blackens the picture that it finds something in."""
    pipeline = cases.SAFETY_CHECKER.make_pipeline()
    with pipeline.enable_omni_offload(device=device):
        seen = watch(pipeline, "vae.decoder.conv_in", "safety_checker.visual_projection")
        images, findings = run(cases.SAFETY_CHECKER, pipeline)
    assert seen == [("vae.decoder.conv_in", {"vae"}), ("safety_checker.visual_projection", {"safety_checker"})]
    assert findings.tolist() == [1, 0]
    assert images[0].max() == 0 < images[1].std()


@pytest.fixture
def adapter(tmp_path):
    """A folder with an IP-Adapter and its image encoder, and what loads them into a pipeline."""
    with seeded(30):
        weights = ip_adapter(unet_2d())
        clip_vision_encoder(layers=2, projects=True).save_pretrained(tmp_path / "image_encoder")
    save_file(
        {f"{kind}.{name}": tensor for kind, tensors in weights.items() for name, tensor in tensors.items()}, tmp_path / "ip.safetensors"
    )

    def load(pipeline):
        pipeline.load_ip_adapter(str(tmp_path), subfolder="", weight_name="ip.safetensors", local_files_only=True)
        pipeline.set_ip_adapter_scale(0.7)
        pipeline.register_modules(feature_extractor=clip_image_processor())

    return load


@pytest.mark.parametrize("keys", [{}, {"device_memory": "1MiB", "keep_between_calls": True}, {"components": ["dit"]}], ids=str)
def test_an_ip_adapter_comes_and_goes(device, adapter, keys):
    """An IP-Adapter that is loaded while enabled, image encoder and all, is in force, leaves with its unloading, and may come again."""
    case, image = cases.TEXT_TO_IMAGE, {"ip_adapter_image": picture()}
    without, expected = resident(case, device), resident(case, device, adapter, **image)
    assert not same(without, expected)
    pipeline = case.make_pipeline()
    with pipeline.enable_omni_offload({"mode": "module", **keys}, device=device):
        assert same(run(case, pipeline), without)
        for _ in range(2):
            adapter(pipeline)
            assert same(run(case, pipeline, **image), expected)
            assert same(run(case, pipeline, **image), expected)
            assert "image_encoder" in loads(pipeline)
            pipeline.unload_ip_adapter()
            assert same(run(case, pipeline), without)
            assert "image_encoder" not in loads(pipeline)
    assert not on_device(pipeline)


def test_several_ip_adapters(device):
    """Two IP-Adapters, loaded in place of one while enabled, are in force with a scale each."""
    case, images = cases.IP_ADAPTER, {"ip_adapter_image": [picture(), picture(width=16)]}

    def load(pipeline):
        with seeded(31):
            adapters = [ip_adapter(pipeline.unet), ip_adapter(pipeline.unet)]
        pipeline.load_ip_adapter(adapters, subfolder=["", ""], weight_name=["", ""])
        pipeline.set_ip_adapter_scale([0.5, 0.9])

    expected = resident(case, device, load, **images)
    pipeline = case.make_pipeline()
    with pipeline.enable_omni_offload(device=device):
        run(case, pipeline)
        load(pipeline)
        assert same(run(case, pipeline, **images), expected)


def test_picture_prompts_are_encoded_once(device):
    """Embeddings of a picture prompt that were made outside of a call serve many: the image encoder does not come again."""
    case, pipeline = cases.IP_ADAPTER, cases.IP_ADAPTER.make_pipeline()
    with pipeline.enable_omni_offload(device=device):
        with torch.no_grad():
            embeddings = pipeline.prepare_ip_adapter_image_embeds(case.make_inputs(pipeline)["ip_adapter_image"], None, device, 1, True)
        assert not on_device(pipeline)
        assert same(run(case, pipeline, ip_adapter_image=..., ip_adapter_image_embeds=embeddings), resident(case, device))
        assert loads(pipeline)["image_encoder"] == 1


def test_an_ip_adapter_is_not_saved(tmp_path):
    """As upstream, a saved pipeline has no IP-Adapter: loaded again, it gives the same once the adapter is loaded too."""
    case = cases.IP_ADAPTER
    pipeline = case.make_pipeline()
    pipeline.save_pretrained(tmp_path)
    loaded = pipelines.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    with pytest.raises(AttributeError, match="image_projection_layers"):
        run(case, loaded)
    with seeded(16):
        loaded.load_ip_adapter(ip_adapter(loaded.unet), subfolder="", weight_name="")
    torch.testing.assert_close(run(case, loaded), run(case, pipeline))


def decode_preview(pipeline, _step, _timestep, tensors):
    tensors["latents"] = tensors["latents"] + pipeline.vae.decode(tensors["latents"], return_dict=False)[0].mean()
    return tensors


def tile(pipeline):
    pipeline.vae.enable_tiling()
    pipeline.vae.enable_slicing()


WAYS = {
    "several images": (cases.TEXT_TO_IMAGE, {"num_images_per_prompt": 2, "guidance_scale": 1.0}, {}),
    "several prompts": (cases.CONTROLNET, {"prompt": ["a", "b"], "negative_prompt": ["c", "d"]}, {}),
    "latents": (cases.TEXT_TO_IMAGE, {"output_type": "latent"}, {"vae": 0}),
    "previews": (cases.CONTROLNET, {"callback_on_step_end": decode_preview}, {"controlnet": 2, "unet": 2, "vae": 2}),
    "guess mode": (cases.CONTROLNET, {"guess_mode": True}, {}),
    "an early end of one": (cases.MULTI_CONTROLNET, {"control_guidance_end": [0.5, 1.0]}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call(way, device):
    """However it is called, a call equals a resident one, and loads what it uses."""
    case, changes, others = WAYS[way]
    pipeline = case.make_pipeline()
    with pipeline.enable_omni_offload(device=device):
        assert same(run(case, pipeline, **changes), resident(case, device, **changes))
        assert loads(pipeline) == {**dict.fromkeys(parts(pipeline), 1), **others}


def test_tiles(device):
    """Decoding tile by tile is one use of the VAE."""
    case, changes = cases.TEXT_TO_IMAGE, {"height": 64, "width": 64, "num_images_per_prompt": 2}
    pipeline = case.make_pipeline()
    with pipeline.enable_omni_offload(device=device):
        tile(pipeline)
        seen = watch(pipeline, "vae.decoder.conv_in")
        assert same(run(case, pipeline, **changes), resident(case, device, tile, **changes))
        assert loads(pipeline)["vae"] == 1
    assert len(seen) > 2


def test_prompts_that_were_encoded_before(device):
    """With embeddings given, also on the host, the text encoder never comes."""
    case, pipeline = cases.TEXT_TO_IMAGE, cases.TEXT_TO_IMAGE.make_pipeline()
    with torch.no_grad():
        prompt, negative = pipeline.encode_prompt("a red cat", "cpu", 1, True, "blurry")
    with pipeline.enable_omni_offload(device=device):
        found = run(case, pipeline, prompt=..., negative_prompt=..., prompt_embeds=prompt, negative_prompt_embeds=negative)
        assert same(found, resident(case, device))
        assert loads(pipeline)["text_encoder"] == 0


def test_skipped_layers_of_the_text_encoder(device):
    """With clip_skip the pipeline runs the text encoder's last norm itself: it is on the device for that."""
    case = cases.TEXT_TO_IMAGE

    def swap(pipeline):
        with seeded(32):
            pipeline.text_encoder = clip_text_encoder(layers=2, projects=True).to(pipeline.unet.device)

    pipeline = case.make_pipeline()
    swap(pipeline)
    changes = {"clip_skip": 1, "guidance_scale": 1.0}
    with pipeline.enable_omni_offload(device=device):
        assert same(run(case, pipeline, **changes), resident(case, device, swap, **changes))
        assert loads(pipeline)["text_encoder"] == 1


def test_siblings_over_the_same_components(device):
    """A pipeline made from another by diffusers' own from_pipe, while that one is enabled, shares its components; both are right."""
    text, image = cases.TEXT_TO_IMAGE.make_pipeline(), cases.IMG2IMG
    expected = resident(cases.TEXT_TO_IMAGE, device)
    other = type(image.make_pipeline())(**cases.TEXT_TO_IMAGE.make_pipeline().components, requires_safety_checker=False).to(device)
    other.set_progress_bar_config(disable=True)
    expected_image = run(image, other)
    with text.enable_omni_offload(device=device):
        sibling = type(other).from_pipe(text)
        sibling.set_progress_bar_config(disable=True)
        with sibling.enable_omni_offload(device=device):
            for _ in range(2):
                assert same(run(cases.TEXT_TO_IMAGE, text), expected)
                assert same(run(image, sibling), expected_image)
        assert same(run(cases.TEXT_TO_IMAGE, text), expected)
    assert not on_device(text)


def test_blocks_in_the_order_of_their_use():
    """Layer strategies learn of a UNet's blocks in the order in which they run, and of each ControlNet's once."""
    pipeline = cases.MULTI_CONTROLNET.make_pipeline()
    streamed = {component.path: component.block_paths for component in resolve_offload_plan(pipeline, LAYERWISE).components}
    assert streamed["unet"] == ("unet.down_blocks", "unet.mid_block", "unet.up_blocks")
    names = [f"controlnet.nets.{index}.{name}" for index in range(2) for name in ("down_blocks", "mid_block")]
    assert streamed["controlnet"] == tuple(names)
    net = control_net()
    pipeline.controlnet = diffusers.MultiControlNetModel([net, net])
    assert resolve_offload_plan(pipeline, LAYERWISE).component("controlnet").block_paths == tuple(names[:2])
    pipeline.controlnet = net
    assert resolve_offload_plan(pipeline, LAYERWISE).component("controlnet").block_paths == (
        "controlnet.down_blocks",
        "controlnet.mid_block",
    )
