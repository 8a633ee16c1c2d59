"""Real models in layer mode: whatever order their blocks run in, the output is a resident run's, and the order is learned."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import diffusers
import pytest
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.testing import sim

STEPS = 3


@attrs.frozen
class Family:
    """How a model is made, called, and where its blocks are.

    Attributes:
        make: Makes the models by component name; those that are DiTs come first.
        run: Runs one step, given the models and the step's number; returns the output.
        blocks: Containers by component; in an order that is not always the one they run in.
        rest: Parts of blocks that the model uses by itself.
        once: Whether every block runs once a step.
    """

    make: Callable[[], Mapping[str, nn.Module]]
    run: Callable[..., torch.Tensor]
    blocks: Mapping[str, tuple[str, ...]]
    rest: frozenset[str] = frozenset()
    once: bool = True


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _one(name: str, blocks: tuple[str, ...], inputs: Callable[[int], Mapping[str, Any]], *, rest=(), once=True, **sizes: Any) -> Family:
    def run(models, step):
        output = models["transformer"](**inputs(step), **options)
        while not isinstance(output, torch.Tensor):
            output = output[0]
        return output

    options = {} if name == "UVit2DModel" else {"return_dict": False}
    return Family(lambda: {"transformer": getattr(diffusers, name)(**sizes)}, run, {"transformer": blocks}, frozenset(rest), once)


def _unet() -> Family:
    return _one(
        "UNet2DConditionModel",
        ("down_blocks", "up_blocks", "mid_block"),
        lambda step: {"sample": _noise(1, 4, 8, 8), "timestep": step, "encoder_hidden_states": _noise(1, 5, 16)},
        sample_size=8,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )


def _latte() -> Family:
    return _one(
        "LatteTransformer3DModel",
        ("transformer_blocks", "temporal_transformer_blocks"),
        lambda step: {
            "hidden_states": _noise(1, 4, 4, 8, 8),
            "timestep": torch.tensor([step]),
            "encoder_hidden_states": _noise(1, 5, 16),
        },
        sample_size=8,
        num_layers=3,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=16,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        video_length=4,
    )


def _wan_vace() -> Family:
    return _one(
        "WanVACETransformer3DModel",
        ("blocks", "vace_blocks"),
        lambda step: {
            "hidden_states": _noise(1, 4, 3, 4, 4),
            "timestep": torch.tensor([step]),
            "encoder_hidden_states": _noise(1, 5, 16),
            "control_hidden_states": _noise(1, 72, 3, 4, 4),
        },
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=4,
        rope_max_seq_len=64,
        vace_layers=[0, 2],
        vace_in_channels=72,
    )


def _lumina2() -> Family:
    return _one(
        "Lumina2Transformer2DModel",
        ("layers", "noise_refiner", "context_refiner"),
        lambda step: {
            "hidden_states": _noise(1, 4, 8, 8),
            "timestep": torch.tensor([step / 4]),
            "encoder_hidden_states": _noise(1, 5, 16),
            "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
        },
        sample_size=32,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=4,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(64, 32, 32),
        cap_feat_dim=16,
    )


def _cascade() -> Family:
    kinds = ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]
    return _one(
        "StableCascadeUNet",
        ("down_blocks", "up_blocks"),
        lambda step: {
            "sample": _noise(1, 4, 8, 8),
            "timestep_ratio": torch.tensor([step / 4]),
            "clip_text_pooled": _noise(1, 1, 32),
            "effnet": _noise(1, 16, 4, 4),
        },
        once=False,
        in_channels=4,
        out_channels=4,
        conditioning_dim=16,
        block_out_channels=[16, 32],
        num_attention_heads=[-1, 4],
        down_num_layers_per_block=[1, 2],
        up_num_layers_per_block=[2, 1],
        down_blocks_repeat_mappers=[1, 1],
        up_blocks_repeat_mappers=[3, 2],
        block_types_per_layer=[kinds[:2], kinds],
        clip_text_pooled_in_channels=32,
        effnet_in_channels=16,
        patch_size=2,
        kernel_size=3,
        dropout=[0.0, 0.0],
        timestep_ratio_embedding_dim=16,
    )


def _autoencoder_dc() -> Family:
    """The decoder runs its levels backwards; levels are lists of blocks, or one of them."""

    def make():
        return {
            "vae": diffusers.AutoencoderDC(
                latent_channels=4,
                attention_head_dim=4,
                encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock"),
                decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock"),
                encoder_block_out_channels=(8, 8, 16, 16),
                decoder_block_out_channels=(8, 8, 16, 16),
                encoder_layers_per_block=(1, 2, 1, 1),
                decoder_layers_per_block=(1, 2, 1, 1),
                encoder_qkv_multiscales=((), (), (5,), (5,)),
                decoder_qkv_multiscales=((), (), (5,), (5,)),
                decoder_norm_types=["rms_norm"] * 4,
                decoder_act_fns=["silu"] * 4,
                upsample_block_type="interpolate",
                downsample_block_type="pixel_unshuffle",
            )
        }

    def run(models, step):
        latent = models["vae"].encode(_noise(1, 3, 32, 32) + step).latent
        return models["vae"].decode(latent).sample

    return Family(make, run, {"vae": ("encoder.down_blocks", "decoder.up_blocks")}, once=False)


def _hunyuan_dit() -> Family:
    return _one(
        "HunyuanDiT2DModel",
        ("blocks",),
        lambda step: {
            "hidden_states": _noise(1, 4, 8, 8),
            "timestep": torch.tensor([float(step)]),
            "encoder_hidden_states": _noise(1, 7, 16),
            "text_embedding_mask": torch.ones(1, 7, dtype=torch.bool),
            "encoder_hidden_states_t5": _noise(1, 9, 16),
            "text_embedding_mask_t5": torch.ones(1, 9, dtype=torch.bool),
            "image_meta_size": torch.tensor([[64.0, 64, 64, 64, 0, 0]]),
            "style": torch.zeros(1, dtype=torch.long),
            "image_rotary_emb": get_2d_rotary_pos_embed(8, ((0, 0), (4, 4)), (4, 4), output_type="pt"),
        },
        sample_size=8,
        num_layers=6,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        hidden_size=32,
        in_channels=4,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        mlp_ratio=2.0,
        text_len=7,
        text_len_t5=9,
        activation_fn="gelu-approximate",
    )


def _sd3_controlnet() -> Family:
    """Two models that alternate, one of which hands the other what its blocks add."""
    sizes = {
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 16,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 16,
        "pos_embed_max_size": 32,
    }

    def make():
        controlnet = diffusers.SD3ControlNetModel(**sizes, num_layers=4)
        for parameter in controlnet.controlnet_blocks.parameters():  # begin as zeros: they would have no effect
            nn.init.normal_(parameter, std=0.05)
        return {"transformer": diffusers.SD3Transformer2DModel(**sizes, num_layers=4), "controlnet": controlnet}

    def run(models, step):
        inputs = {
            "hidden_states": _noise(1, 4, 8, 8),
            "timestep": torch.tensor([step]),
            "encoder_hidden_states": _noise(1, 5, 16),
            "pooled_projections": _noise(1, 16),
            "return_dict": False,
        }
        added = models["controlnet"](controlnet_cond=_noise(1, 4, 8, 8), conditioning_scale=1.0, **inputs)[0]
        return models["transformer"](block_controlnet_hidden_states=added, **inputs)[0]

    blocks = {"transformer": ("transformer_blocks",), "controlnet": ("transformer_blocks",)}
    return Family(make, run, blocks)


def _mochi() -> Family:
    return _one(
        "MochiTransformer3DModel",
        ("transformer_blocks",),
        lambda step: {
            "hidden_states": _noise(1, 12, 2, 4, 4),
            "timestep": torch.tensor([step]),
            "encoder_hidden_states": _noise(1, 7, 16),
            "encoder_attention_mask": torch.ones(1, 7, dtype=torch.bool),
        },
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=16,
        time_embed_dim=16,
        max_sequence_length=7,
    )


def _aura_flow() -> Family:
    return _one(
        "AuraFlowTransformer2DModel",
        ("single_transformer_blocks", "joint_transformer_blocks"),
        lambda step: {
            "hidden_states": _noise(1, 4, 8, 8),
            "timestep": torch.tensor([step / 4]),
            "encoder_hidden_states": _noise(1, 5, 16),
        },
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )


def _uvit() -> Family:
    return _one(
        "UVit2DModel",
        ("transformer_layers", "up_block", "down_block"),
        lambda step: {
            "input_ids": torch.arange(16).view(1, 4, 4) + step,
            "encoder_hidden_states": _noise(1, 5, 16),
            "pooled_text_emb": _noise(1, 16),
            "micro_conds": torch.ones(1, 5),
        },
        hidden_size=16,
        cond_embed_dim=16,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=40,
        encoder_hidden_size=16,
        vocab_size=32,
        codebook_size=24,
        in_channels=16,
        block_out_channels=16,
        num_res_blocks=1,
        downsample=True,
        upsample=True,
        block_num_heads=2,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
    )


def _dit() -> Family:
    """After the loop, the model calls a part of the first block once more."""
    return _one(
        "DiTTransformer2DModel",
        ("transformer_blocks",),
        lambda step: {"hidden_states": _noise(1, 4, 8, 8), "timestep": torch.tensor([step]), "class_labels": torch.tensor([1])},
        rest=("transformer.transformer_blocks.0.norm1.emb",),
        sample_size=8,
        num_layers=4,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )


def _z_image() -> Family:
    return _one(
        "ZImageTransformer2DModel",
        ("layers", "context_refiner", "noise_refiner"),
        lambda step: {"x": [_noise(4, 1, 8, 8)], "t": torch.tensor([step / 4]), "cap_feats": [_noise(5, 16)]},
        in_channels=4,
        dim=32,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )


FAMILIES = [
    *(_unet, _latte, _wan_vace, _lumina2, _cascade, _autoencoder_dc),
    *(_hunyuan_dit, _sd3_controlnet, _mochi, _aura_flow, _uvit, _dit, _z_image),
]


def _pipeline(family: Family, note: Callable[[Any], None]) -> Any:
    torch.manual_seed(0)
    models = {name: model.eval().requires_grad_(False) for name, model in family.make().items()}
    dits = [name for name in models if name != "vae"]

    class Steps(OmniOffloadMixin):
        _dit_modules = dits
        _vae_modules = [name for name in models if name == "vae"]
        _offload_entry_points = {"vae": ("encode", "decode")} if "vae" in models else {}
        _offload_plan = OffloadPlan(
            block_attrs={name: family.blocks[name] for name in dits},
            encoder_block_attrs={name: family.blocks[name] for name in models if name == "vae"},
            rest_submodules=family.rest,
        )

        def __init__(self):
            for name, model in models.items():
                setattr(self, name, model)

        def __call__(self):
            outputs = []
            for step in range(STEPS):
                outputs.append(family.run(models, step))
                note(self)
            return outputs

    return Steps()


@pytest.mark.parametrize(
    ("slots", "residents"),
    [(3, 0), pytest.param(2, 0, marks=pytest.mark.exhaustive), pytest.param(2, 2, marks=pytest.mark.exhaustive)],
)
@pytest.mark.filterwarnings("ignore:In [a-zA-Z]+ autocast")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__[1:])
def test_models(device, family, slots, residents):
    """The output is a resident run's to the last bit, without a race; from the second step on every block is there that streamed before."""
    sim.configure(mode="virtual")
    family, seen = family(), []

    def note(pipe):
        if pipe.offload_backend is not None:
            rows = {part.name: part for part in pipe.offload_report.components}
            members = pipe.offload_backend._rotation.members.values()
            streams = {(member.name, index) for member in members for index in member.owner.residency.ring.blocks}
            seen.append((sum(row.prefetch_hits for row in rows.values()), sum(row.misses for row in rows.values()), streams))

    with torch.no_grad():
        want = _pipeline(family, note)()
        pipe = _pipeline(family, note)
        kind = "vae" if "vae" in family.blocks else "dit"
        options = {kind: {"resident_layers": residents}}
        with pipe.enable_omni_offload("layer", device=device, components=[kind], slots=slots, layer_options=options) as backend:
            rings = [member.owner.residency.ring for member in backend._rotation.members.values()]
            streamed = sum(len(ring.blocks) for ring in rings)
            assert streamed >= len(rings) * (4 - residents)
            for got, expected in zip(pipe(), want, strict=True):
                assert torch.equal(got.cpu(), expected)
            del got
            if kind == "dit" and len(rings) == 1:
                for (hits, misses, streams), (more, as_many, streaming) in itertools.pairwise(seen):
                    assert as_many - misses <= len(streaming - streams)  # those that stayed until the blocks' times were known
                    copied = streamed if streamed > slots else 0  # else they stay where they are
                    assert more - hits == copied or (not family.once and more > hits)
    assert sim.races() == []


def test_a_decoder_that_runs_backwards(device):
    """An autoencoder's decoder runs its levels from the last to the first: known after the first picture."""
    sim.configure(mode="virtual")
    family = _autoencoder_dc()
    plain, pipe = _pipeline(family, lambda _: None), _pipeline(family, lambda _: None)
    latent, told = _noise(1, 4, 4, 4), []
    with torch.no_grad(), pipe.enable_omni_offload("layer", device=device, components=["vae"]) as backend:
        decoder = [block for block in backend._rotation.members["vae"].owner.residency.ring.blocks.values() if "decoder" in block.name]
        for _ in range(3):
            assert torch.equal(pipe.vae.decode(latent).sample.cpu(), plain.vae.decode(latent).sample)
            row = pipe.offload_report.components[0]
            told.append((row.prefetch_hits, row.misses))
    for (hits, misses), (more, as_many) in itertools.pairwise(told):
        assert as_many == misses
        assert more - hits == len(decoder) > 3
