"""Allegro cases: random weights, a few ten thousand parameters a component, eight frames of 16 x 16 pixels."""

import functools
from typing import Any

from diffusers import AllegroTransformer3DModel, AutoencoderKLAllegro, DDIMScheduler

from omni_offload.testing import PipelineCase
from pipelines.allegro.pipeline_allegro import OmniAllegroPipeline
from pipelines.tiny.components import TEXT_WIDTH, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = ["ALLEGRO"]


def _vae() -> Any:
    """Return a VAE that decodes, which it does in tiles only, and in whole ones."""
    vae = ready(
        AutoencoderKLAllegro(
            in_channels=3,
            out_channels=3,
            down_block_types=("AllegroDownBlock3D",) * 4,
            up_block_types=("AllegroUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        )
    )
    vae.enable_tiling()
    vae.kernel, vae.stride = (8, 16, 16), (8, 8, 8)
    return vae


def _transformer() -> Any:
    return ready(
        AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            cross_attention_dim=24,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            caption_channels=TEXT_WIDTH,
        )
    )


def _pipeline() -> OmniAllegroPipeline:
    return OmniAllegroPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(layers=2),
        vae=_vae(),
        transformer=_transformer(),
        scheduler=DDIMScheduler(),
    )


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "negative_prompt": "blurry",
        "height": 16,
        "width": 16,
        "num_frames": 8,
        "num_inference_steps": 2,
        "max_sequence_length": 16,
        "clean_caption": False,
        "output_type": "pt",
        "generator": generator(),
    }


ALLEGRO = PipelineCase(
    name="allegro",
    make_pipeline=functools.partial(seeded_pipeline, 53, _pipeline),
    make_inputs=_make_inputs,
    outputs=as_tensors,
    expected_failures={"check_save_pretrained": "upstream's VAE decodes in tiles only, and that it was asked for tiles is not saved"},
)
"""Text to video with guidance: three blocks."""
