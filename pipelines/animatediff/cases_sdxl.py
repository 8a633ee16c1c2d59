"""AnimateDiff cases with a Stable Diffusion XL UNet: random weights, three frames of 16 x 16 pixels."""

from typing import Any

from diffusers import DDIMScheduler, ModelMixin, MotionAdapter

from pipelines.animatediff.pipeline_sdxl import OmniAnimateDiffSDXLPipeline
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready
from pipelines.tiny.logs import NOTHING_IN_FLOAT32, keep_back
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import unet_2d

__all__ = ["ANIMATEDIFF_SDXL"]

_WIDTHS = (8, 24)
_TIME_WIDTH = 4


def _unet() -> Any:
    return unet_2d(
        block_out_channels=_WIDTHS,
        cross_attention_dim=2 * TEXT_WIDTH,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_WIDTH,
        projection_class_embeddings_input_dim=6 * _TIME_WIDTH + TEXT_WIDTH,
    )


def _pipeline() -> OmniAnimateDiffSDXLPipeline:
    keep_back(ModelMixin, NOTHING_IN_FLOAT32)
    adapter = MotionAdapter(
        block_out_channels=_WIDTHS,
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
        use_motion_mid_block=False,
    )
    pipeline = OmniAnimateDiffSDXLPipeline(
        vae=autoencoder_kl(widths=(8, 16)),
        text_encoder=clip_text_encoder(layers=2),
        text_encoder_2=clip_text_encoder(layers=2, projects=True, hidden_act="gelu"),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=_unet(),
        motion_adapter=ready(adapter),
        scheduler=DDIMScheduler(beta_schedule="linear", steps_offset=1, clip_sample=False),
    )
    pipeline.unet.eval()
    return pipeline


ANIMATEDIFF_SDXL = prompted_case("animatediff_sdxl", _pipeline, seed=200, negative_prompt="blurry", height=16, width=16, num_frames=3)
"""Text to video, by an adapter without a middle block."""
