"""Chroma cases: random weights, a few hundred thousand parameters, pictures of 32 x 32 pixels."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from diffusers import ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from omni_offload.testing import PipelineCase
from pipelines.chroma.pipeline_chroma import OmniChromaImg2ImgPipeline, OmniChromaInpaintPipeline, OmniChromaPipeline
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["CHROMA", "CHROMA_IMG2IMG", "CHROMA_INPAINT"]


def _transformer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # upstream uses a name that it has deprecated
        return ready(
            ChromaTransformer2DModel(
                patch_size=1,
                in_channels=16,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=TEXT_WIDTH,
                axes_dims_rope=(4, 6, 6),
                approximator_num_channels=8,
                approximator_hidden_dim=16,
                approximator_layers=2,
            )
        )


def _transformer_of_checkpoints() -> Any:
    """Return a DiT whose configuration has what that of the checkpoints has: inpainting reads it, though the model knows it not."""
    transformer = _transformer()
    transformer.register_to_config(guidance_embeds=False)
    return transformer


def _pipeline(cls: type, transformer: Callable[[], Any]) -> Any:
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder_kl(widths=(8, 16), shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=t5_encoder(layers=2),
        tokenizer=t5_tokenizer(),
        transformer=transformer(),
    )


def _making(cls: type, seed: int, transformer: Callable[[], Any] = _transformer) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, transformer))


_inputs = functools.partial(prompted_inputs, negative_prompt="blurry", guidance_scale=3.0, max_sequence_length=32)

CHROMA = PipelineCase(name="chroma", make_pipeline=_making(OmniChromaPipeline, 35), make_inputs=_inputs(), outputs=as_tensors)
"""Text to image with guidance: the DiT runs twice a step."""

CHROMA_IMG2IMG = PipelineCase(
    name="chroma_img2img",
    make_pipeline=_making(OmniChromaImg2ImgPipeline, 36),
    make_inputs=_inputs(image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture and text to image: two of three steps."""

CHROMA_INPAINT = PipelineCase(
    name="chroma_inpaint",
    make_pipeline=_making(OmniChromaInpaintPipeline, 37, _transformer_of_checkpoints),
    make_inputs=_inputs(image=picture(), mask_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Into a masked picture: two of three steps."""
