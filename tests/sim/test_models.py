"""Whole models give the CPU's bits on the device, and no model has a race."""

import diffusers
import pytest
import torch
import transformers

from omni_offload.testing import sim


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return model, inputs, lambda made: made.sample


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 3, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": torch.randn(1, 8, 32),
    }
    return model, inputs, lambda made: made.sample


def unet():
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    inputs = {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 3]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
    }
    return model, inputs, lambda made: made.sample


def vae():
    model = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    return model, {"sample": torch.randn(1, 3, 32, 32)}, lambda made: made.sample


def video_vae():
    model = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return model, {"sample": torch.randn(1, 3, 5, 32, 32)}, lambda made: made.sample


def t5():
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
    return transformers.T5EncoderModel(config), {"input_ids": torch.arange(20)[None]}, lambda made: made.last_hidden_state


def clip():
    config = transformers.CLIPTextConfig(
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
    return transformers.CLIPTextModel(config), {"input_ids": torch.arange(77)[None]}, lambda made: made.last_hidden_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [flux, wan, unet, vae, video_vae, t5, clip])
def test_model_gives_the_bits_of_the_cpu(device, family, dtype):
    torch.manual_seed(0)
    model, inputs, output = family()
    model.eval().to(dtype)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad():
        expected = output(model(**inputs))
        made = output(model.to(device)(**{name: value.to(device) for name, value in inputs.items()}))
    assert made.device == device
    assert torch.equal(made.cpu(), expected)
    assert made.isfinite().all()
    assert sim.races() == []
