"""Flux, SDXL and Wan 2.2 pipelines whose components have the size ratios of the real models, 200 to 230 MiB each in float32."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from omni_offload import OmniOffloadMixin
from pipelines.flux.pipeline_flux import OmniFluxPipeline
from pipelines.tiny.seeding import generator, seeded
from pipelines.tiny.tokenizers import (
    CLIP_BOS,
    CLIP_EOS,
    CLIP_VOCABULARY_SIZE,
    T5_VOCABULARY_SIZE,
    clip_tokenizer,
    t5_tokenizer,
)
from pipelines.wan.pipeline_wan import OmniWanPipeline

__all__ = ["SHAPES", "OmniStableDiffusionXLPipeline", "Shape", "weight_bytes"]


class OmniStableDiffusionXLPipeline(OmniOffloadMixin, StableDiffusionXLPipeline):
    """`StableDiffusionXLPipeline` that owns its offloading."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "image_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vae": ("encode", "decode"), "": ("encode_prompt",)}


@attrs.frozen(kw_only=True)
class Shape:
    """One pipeline to measure.

    Attributes:
        name: As in the table.
        real_gb: Component -> 10^9 bytes of the real model's weights in 16 bits.
        make_parts: Makes the components and settings that both classes' constructors take.
        upstream: diffusers' class.
        omni: The class that owns its offloading.
        arguments: What every call is given besides a generator.
    """

    name: str
    real_gb: Mapping[str, float]
    make_parts: Callable[[], dict[str, Any]]
    upstream: type
    omni: type
    arguments: Mapping[str, Any]

    def make(self, cls: type) -> Any:
        """Build a pipeline, every time with the same weights."""
        with seeded(0), torch.no_grad():
            pipeline = cls(**self.make_parts())
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval().requires_grad_(False)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def call(self, pipeline: Any) -> torch.Tensor:
        """Run one generation and return its tensor."""
        result = pipeline(**self.arguments, output_type="pt", generator=generator())
        return next(iter(result.values()))


def weight_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's distinct parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _clip(cls: type, width: int, layers: int) -> Any:
    return cls(
        CLIPTextConfig(
            vocab_size=CLIP_VOCABULARY_SIZE,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            projection_dim=width,
            bos_token_id=CLIP_BOS,
            eos_token_id=CLIP_EOS,
            pad_token_id=CLIP_EOS,
        )
    )


def _t5(cls: type, config: type, layers: int) -> Any:
    settings = {"d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 1280, "feed_forward_proj": "gated-gelu"}
    return cls(config(vocab_size=T5_VOCABULARY_SIZE, num_layers=layers, **settings))


def _vae(widths: tuple[int, ...], **settings: Any) -> Any:
    levels = len(widths)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=8,
        **settings,
    )


def _flux() -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": _vae((16, 24, 32, 40), latent_channels=16, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        "text_encoder": _clip(CLIPTextModel, 96, 3),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": _t5(T5EncoderModel, T5Config, 5),
        "tokenizer_2": t5_tokenizer(),
        "transformer": FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=2,
            num_single_layers=5,
            attention_head_dim=64,
            num_attention_heads=8,
            joint_attention_dim=512,
            pooled_projection_dim=96,
            guidance_embeds=True,
            axes_dims_rope=(16, 24, 24),
        ),
    }


def _sdxl() -> dict[str, Any]:
    return {
        "scheduler": EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1
        ),
        "vae": _vae((32, 48, 64, 80), latent_channels=4),
        "text_encoder": _clip(CLIPTextModel, 192, 4),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": _clip(CLIPTextModelWithProjection, 320, 9),
        "tokenizer_2": clip_tokenizer(),
        "unet": UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(64, 128, 256),
            layers_per_block=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 3),
            attention_head_dim=(2, 4, 8),
            cross_attention_dim=512,
            norm_num_groups=8,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 320,
        ),
        "add_watermarker": False,
    }


def _wan_transformer() -> Any:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=8,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=512,
        freq_dim=64,
        ffn_dim=1984,
        num_layers=5,
        rope_max_seq_len=64,
    )


def _wan() -> dict[str, Any]:
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": _t5(UMT5EncoderModel, UMT5Config, 3),
        "vae": AutoencoderKLWan(
            base_dim=12,
            z_dim=16,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "transformer": _wan_transformer(),
        "transformer_2": _wan_transformer(),
        "boundary_ratio": 0.875,
    }


SHAPES = (
    Shape(
        name="Flux",
        real_gb={"text_encoder": 0.25, "text_encoder_2": 9.5, "transformer": 24, "vae": 0.17},
        make_parts=_flux,
        upstream=FluxPipeline,
        omni=OmniFluxPipeline,
        arguments={
            "prompt": "a red cat",
            "height": 128,
            "width": 128,
            "num_inference_steps": 4,
            "max_sequence_length": 32,
        },
    ),
    Shape(
        name="SDXL",
        real_gb={"text_encoder": 0.25, "text_encoder_2": 1.4, "unet": 5.1, "vae": 0.17},
        make_parts=_sdxl,
        upstream=StableDiffusionXLPipeline,
        omni=OmniStableDiffusionXLPipeline,
        arguments={"prompt": "a red cat", "height": 64, "width": 64, "num_inference_steps": 4},
    ),
    Shape(
        name="Wan 2.2",
        real_gb={"text_encoder": 11, "transformer": 28, "transformer_2": 28, "vae": 0.5},
        make_parts=_wan,
        upstream=WanPipeline,
        omni=OmniWanPipeline,
        arguments={
            "prompt": "a red cat",
            "negative_prompt": "blurry",
            "height": 64,
            "width": 64,
            "num_frames": 9,
            "num_inference_steps": 4,
            "guidance_scale": 4.0,
            "guidance_scale_2": 3.0,
            "max_sequence_length": 32,
        },
    ),
)
