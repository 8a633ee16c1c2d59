"""HiDream cases: random weights, a few hundred thousand parameters, pictures of 128 x 128 pixels, whose area upstream decides."""

import functools
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, HiDreamImageTransformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.hidream.pipeline_hidream import OmniHiDreamImagePipeline
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.language import llama_encoder
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer, llama_tokenizer, t5_tokenizer

__all__ = ["HIDREAM"]


def _transformer() -> Any:
    """Return a DiT of four blocks, with two of three experts each; every block takes its own layer of Llama's."""
    return ready(
        HiDreamImageTransformer2DModel(
            patch_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[TEXT_WIDTH, TEXT_WIDTH],
            text_emb_dim=2 * TEXT_WIDTH,
            num_routed_experts=3,
            num_activated_experts=2,
            axes_dims_rope=(4, 6, 6),
            max_resolution=(128, 128),
            llama_layers=[0, 1, 1, 0],
            force_inference_output=True,
        )
    )


def _pipeline() -> OmniHiDreamImagePipeline:
    return OmniHiDreamImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder_kl(widths=(8,), mid_block_add_attention=False, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=clip_text_encoder(layers=2, projects=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text_encoder(layers=2, projects=True, hidden_act="gelu"),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(layers=2),
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=llama_encoder(layers=2, head=True),
        tokenizer_4=llama_tokenizer(),
        transformer=_transformer(),
    )


def _make_inputs(_pipeline: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "negative_prompt": "blurry",
        "height": 128,
        "width": 128,
        "num_inference_steps": 2,
        "max_sequence_length": 32,
        "output_type": "pt",
        "generator": generator(),
    }


HIDREAM = PipelineCase(
    name="hidream",
    make_pipeline=functools.partial(seeded_pipeline, 43, _pipeline),
    make_inputs=_make_inputs,
    outputs=as_tensors,
)
"""Text to image with guidance, both prompts in one run of the DiT: four encoders and two blocks of each kind."""
