"""What is special in Stable Diffusion XL: two encoders in turn, and a VAE that a call in float16 casts and casts back."""

import pytest
import torch
from pipeline_runs import loads, on_device, parts, run, same

from omni_offload.testing import sim
from pipelines.sdxl import cases

FP16 = [cases.TEXT_TO_IMAGE_FP16, cases.IMG2IMG_FP16]


def watch(pipeline, *names):
    """Return a list that gets the name of a half of the VAE, its type and the components on the device, whenever it runs."""
    seen = []
    for name in names:
        first = pipeline.vae.get_submodule(name).conv_in
        first.register_forward_pre_hook(lambda conv, _, name=name: seen.append((name, conv.weight.dtype, on_device(pipeline))))
    return seen


@pytest.mark.parametrize("case", FP16, ids=lambda case: case.name)
def test_the_vae_is_cast_in_mid_call(case, device):
    """The VAE runs in float32, on a device smaller than the weights, and its master is in float16 afterwards, as a resident one is."""
    whole, pipeline = case.make_pipeline().to(device), case.make_pipeline()
    expected = run(case, whole)
    weights = sum(t.nbytes for part in parts(pipeline).values() for t in part.parameters())
    halves = ["decoder"] if case is cases.TEXT_TO_IMAGE_FP16 else ["encoder", "decoder"]
    with pipeline.enable_omni_offload(device=device):
        seen = watch(pipeline, *halves)
        with sim.settings(capacity=sim.allocated() + int(0.9 * weights)):
            for _ in range(2):
                assert same(run(case, pipeline), expected)
                assert {p.dtype for p in pipeline.vae.parameters()} == {torch.float16}
        assert seen == [(name, torch.float32, {"vae"}) for name in halves] * 2
        assert not on_device(pipeline)
    for name, weight in whole.vae.state_dict().items():
        found = pipeline.vae.state_dict()[name]
        assert (found.device.type, found.dtype) == ("cpu", weight.dtype)
        assert torch.equal(found, weight.cpu())


def test_casts_leave_no_pinned_memory(device):
    """However often the VAE is cast, no more is pinned than after the first call."""
    case, pipeline = cases.TEXT_TO_IMAGE_FP16, cases.TEXT_TO_IMAGE_FP16.make_pipeline()
    with pipeline.enable_omni_offload(device=device):
        run(case, pipeline)
        pinned = pipeline.offload_report.pinned_host_bytes
        for _ in range(3):
            run(case, pipeline)
            assert pipeline.offload_report.pinned_host_bytes == pinned
    assert sim.pinned_bytes() == 0


def test_a_vae_that_stays_is_cast_too(device):
    """A VAE that is on the device while enabled is cast there; after a call nothing but its weights is held for it."""
    case, whole, pipeline = cases.TEXT_TO_IMAGE_FP16, cases.TEXT_TO_IMAGE_FP16.make_pipeline(), cases.TEXT_TO_IMAGE_FP16.make_pipeline()
    expected = run(case, whole.to(device))
    with pipeline.enable_omni_offload(device=device, mode="module", components=["dit"]):
        held = sim.allocated()
        for _ in range(2):
            assert same(run(case, pipeline), expected)
            assert sim.allocated() <= held + 8192
        assert on_device(pipeline) == {"text_encoder", "text_encoder_2", "vae"}
    assert {p.dtype for p in pipeline.vae.parameters()} == {torch.float16}


def test_a_call_that_fails_in_between_leaves_no_cast(device):
    """Where decoding fails, the VAE is in float16 again: the next call is as any other. Upstream's own would stay in float32."""
    case, pipeline = cases.TEXT_TO_IMAGE_FP16, cases.TEXT_TO_IMAGE_FP16.make_pipeline()
    expected = run(case, cases.TEXT_TO_IMAGE_FP16.make_pipeline().to(device))

    def fail(*_):
        raise LookupError("in the decoder")

    with pipeline.enable_omni_offload(device=device):
        handle = pipeline.vae.decoder.mid_block.register_forward_pre_hook(fail)
        with pytest.raises(LookupError, match="in the decoder"):
            run(case, pipeline)
        assert {p.dtype for p in pipeline.vae.parameters()} == {torch.float16}
        assert not on_device(pipeline)
        handle.remove()
        assert same(run(case, pipeline), expected)


def test_encoders_that_alternate_are_loaded_once(device):
    """With a negative prompt the encoders run in turn, twice each; each is loaded once a call."""
    case, pipeline = cases.TEXT_TO_IMAGE, cases.TEXT_TO_IMAGE.make_pipeline()
    order = []
    pipeline.text_encoder.encoder.register_forward_pre_hook(lambda *_: order.append(1))
    pipeline.text_encoder_2.text_model.encoder.register_forward_pre_hook(lambda *_: order.append(2))
    with pipeline.enable_omni_offload(device=device):
        run(case, pipeline)
        assert loads(pipeline) == {"text_encoder": 1, "text_encoder_2": 1, "unet": 1, "vae": 1}
    assert order == [1, 2, 1, 2]


def test_base_and_refiner_share_what_they_share(device):
    """A base model hands its latents to a refiner with the same VAE and second encoder, both enabled: as a resident pair."""

    def pair():
        base, refiner = cases.TEXT_TO_IMAGE_FP16.make_pipeline(), cases.IMG2IMG_FP16.make_pipeline()
        refiner.vae, refiner.text_encoder_2 = base.vae, base.text_encoder_2
        return base, refiner

    def draw(base, refiner):
        (latents,) = run(cases.TEXT_TO_IMAGE_FP16, base, num_inference_steps=4, denoising_end=0.5, output_type="latent")
        return run(cases.IMG2IMG_FP16, refiner, image=latents, num_inference_steps=4, denoising_start=0.5)

    base, refiner = pair()
    expected = draw(base.to(device), refiner.to(device))
    base, refiner = pair()
    with base.enable_omni_offload(device=device), refiner.enable_omni_offload(device=device):
        for _ in range(2):
            assert same(draw(base, refiner), expected)
            assert not on_device(base) | on_device(refiner)
