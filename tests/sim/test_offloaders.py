"""The offloaders of diffusers run unchanged on the device; the checker passes them, and catches a wait taken out."""

import diffusers
import pytest
import torch
import transformers

from omni_offload.testing import sim


@pytest.fixture(scope="module")
def make_pipeline():
    """A tiny Flux pipeline without tokenizers, equal each time; and its inputs."""

    def make():
        torch.manual_seed(0)
        text = transformers.CLIPTextConfig(
            vocab_size=514,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            projection_dim=32,
            bos_token_id=512,
            eos_token_id=513,
            pad_token_id=513,
        )
        t5 = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
        pipe = diffusers.FluxPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=diffusers.AutoencoderKL(
                down_block_types=["DownEncoderBlock2D"] * 2,
                up_block_types=["UpDecoderBlock2D"] * 2,
                block_out_channels=(16, 32),
                layers_per_block=1,
                latent_channels=4,
                norm_num_groups=8,
                shift_factor=0.1,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ).eval(),
            text_encoder=transformers.CLIPTextModel(text).eval(),
            text_encoder_2=transformers.T5EncoderModel(t5).eval(),
            tokenizer=None,
            tokenizer_2=None,
            transformer=diffusers.FluxTransformer2DModel(
                patch_size=1,
                in_channels=16,
                num_layers=3,
                num_single_layers=3,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                axes_dims_rope=(4, 6, 6),
            ).eval(),
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


def generate(pipe):
    """Encode by hand (there is no tokenizer), then run the pipeline."""
    where = pipe._execution_device
    with torch.no_grad():
        pooled = pipe.text_encoder(torch.arange(77, device=where)[None]).pooler_output
        prompt = pipe.text_encoder_2(torch.arange(16, device=where)[None]).last_hidden_state
        return pipe(
            prompt_embeds=prompt,
            pooled_prompt_embeds=pooled,
            num_inference_steps=2,
            height=32,
            width=32,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        ).images.cpu()


@pytest.fixture(scope="module")
def expected(make_pipeline):
    return generate(make_pipeline())


OFFLOADERS = {
    "resident": lambda pipe: pipe.to("sim"),
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="sim"),
    "model, device found": lambda pipe: pipe.enable_model_cpu_offload(),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="sim"),
    "blocks": lambda pipe: group(pipe, "block_level", num_blocks_per_group=1),
    "blocks, stream": lambda pipe: group(pipe, "block_level", num_blocks_per_group=1, use_stream=True),
    "leaves, stream": lambda pipe: group(pipe, "leaf_level", use_stream=True),
    "leaves, stream, recorded": lambda pipe: group(pipe, "leaf_level", use_stream=True, record_stream=True),
}


def group(pipe, kind, **options):
    pipe.enable_group_offload(onload_device=torch.device("sim"), offload_device=torch.device("cpu"), offload_type=kind, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OFFLOADERS)
def test_offloader_of_diffusers(device, make_pipeline, expected, name):
    pipe = make_pipeline()
    sim.reset_counters()
    OFFLOADERS[name](pipe)
    made = generate(pipe)
    assert torch.equal(made, expected)
    assert sim.h2d_bytes() > 0
    assert sim.races() == []
    if "stream" in name:
        assert sim.pinned_bytes() > 0


@pytest.mark.filterwarnings("ignore")
def test_wait_taken_out_of_an_offloader_is_found(device, make_pipeline, expected, monkeypatch):
    """The output stays equal, so that no comparison of outputs would find it."""
    pipe = make_pipeline()
    OFFLOADERS["blocks, stream"](pipe)
    monkeypatch.setattr(torch.sim, "current_stream", lambda _device=None: Unwaited())
    made = generate(pipe)
    assert torch.equal(made, expected)
    assert {race.kind for race in sim.races()} >= {"reuse-after-free"}


class Unwaited:
    """A stream that does not wait."""

    def synchronize(self):
        pass
