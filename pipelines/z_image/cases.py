"""Z-Image cases: random weights, a few hundred thousand parameters, pictures of 32 x 32 pixels."""

import functools
from collections.abc import Callable
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from transformers import Siglip2ImageProcessorPil, Siglip2VisionConfig, Siglip2VisionModel

from omni_offload.testing import PipelineCase
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.language import qwen3_encoder
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import qwen_tokenizer
from pipelines.z_image.pipeline_z_image import (
    OmniZImageImg2ImgPipeline,
    OmniZImageInpaintPipeline,
    OmniZImageOmniPipeline,
    OmniZImagePipeline,
)

__all__ = ["Z_IMAGE", "Z_IMAGE_IMG2IMG", "Z_IMAGE_INPAINT", "Z_IMAGE_OMNI"]

_SIGLIP_PATCHES = 4

_TABLE_STAYS = {
    "check_release": "outside of calls the DiT's rope_embedder, which is no module, leaves its table of positions on the device"
}


def _transformer(**settings: Any) -> Any:
    return ready(
        ZImageTransformer2DModel(
            dim=32,
            n_refiner_layers=2,
            n_heads=2,
            n_kv_heads=2,
            in_channels=4,
            n_layers=2,
            cap_feat_dim=TEXT_WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[512, 64, 64],
            **settings,
        )
    )


def _siglip() -> Any:
    """Return a SigLIP 2 image encoder, which sees a picture in four patches."""
    config = Siglip2VisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=16,
        num_patches=_SIGLIP_PATCHES,
    )
    return ready(Siglip2VisionModel(config))


def _pipeline(cls: type, **parts: Callable[[], Any]) -> Any:
    """Make a pipeline, with another DiT or further parts where they are given."""
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder_kl(widths=(8, 16), shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=qwen3_encoder(layers=2),
        tokenizer=qwen_tokenizer(),
        transformer=parts.get("transformer", _transformer)(),
        **{name: make() for name, make in parts.items() if name != "transformer"},
    )


def _making(cls: type, seed: int, **parts: Callable[[], Any]) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, **parts))


def _omni() -> Any:
    """Make a pipeline in bfloat16: upstream casts pictures to that type whatever the VAE has."""
    pipeline = _pipeline(
        OmniZImageOmniPipeline,
        transformer=lambda: _transformer(siglip_feat_dim=TEXT_WIDTH),
        siglip=_siglip,
        siglip_processor=lambda: Siglip2ImageProcessorPil(patch_size=16, max_num_patches=_SIGLIP_PATCHES),
    )
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.transformer, pipeline.siglip):
        for parameter in part.parameters():  # no buffer: loading in bfloat16 leaves the text encoder's frequencies as they are
            parameter.data = parameter.data.bfloat16()
    return pipeline


_inputs = functools.partial(prompted_inputs, negative_prompt="blurry", guidance_scale=3.0, max_sequence_length=64)

Z_IMAGE = PipelineCase(
    name="z_image", make_pipeline=_making(OmniZImagePipeline, 44), make_inputs=_inputs(), outputs=as_tensors, expected_failures=_TABLE_STAYS
)
"""Text to image with guidance, both prompts in one run of the DiT."""

Z_IMAGE_IMG2IMG = PipelineCase(
    name="z_image_img2img",
    make_pipeline=_making(OmniZImageImg2ImgPipeline, 45),
    make_inputs=_inputs(image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
    expected_failures=_TABLE_STAYS,
)
"""Picture and text to image: two of three steps."""

Z_IMAGE_INPAINT = PipelineCase(
    name="z_image_inpaint",
    make_pipeline=_making(OmniZImageInpaintPipeline, 46),
    make_inputs=_inputs(image=picture(), mask_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
    expected_failures=_TABLE_STAYS,
)
"""Into a masked picture: two of three steps."""

Z_IMAGE_OMNI = PipelineCase(
    name="z_image_omni",
    make_pipeline=functools.partial(seeded_pipeline, 200, _omni),
    make_inputs=_inputs(image=[picture(width=64, height=64)]),
    outputs=as_tensors,
    expected_failures=_TABLE_STAYS,
)
"""Text and a picture to image: the picture goes through the VAE, and through an image encoder."""
