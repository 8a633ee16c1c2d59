"""Stable Video Diffusion cases: random weights, two frames of 16 x 16 pixels."""

from typing import Any

from diffusers import AutoencoderKLTemporalDecoder, EulerDiscreteScheduler, UNetSpatioTemporalConditionModel

from pipelines.svd.pipeline_svd import OmniStableVideoDiffusionPipeline
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, clip_image_processor, clip_vision_encoder, ready
from pipelines.tiny.inputs import picture

__all__ = ["STABLE_VIDEO_DIFFUSION"]

_SEEN = 224
"""Height and width that the pipeline gives to the image encoder, whatever that takes."""


def _unet() -> Any:
    """Return a UNet of the least width that there is: its norms have groups of 32 channels."""
    return ready(
        UNetSpatioTemporalConditionModel(
            sample_size=8,
            in_channels=8,
            out_channels=4,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            block_out_channels=(32, 32),
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
            layers_per_block=1,
            cross_attention_dim=TEXT_WIDTH,
            num_attention_heads=(2, 2),
            num_frames=2,
        )
    )


def _vae() -> Any:
    vae = AutoencoderKLTemporalDecoder(
        down_block_types=("DownEncoderBlock2D",) * 2, block_out_channels=(32, 32), latent_channels=4, layers_per_block=1
    )
    return ready(vae)


def _pipeline() -> OmniStableVideoDiffusionPipeline:
    scheduler = EulerDiscreteScheduler(
        beta_schedule="scaled_linear",
        interpolation_type="linear",
        prediction_type="v_prediction",
        use_karras_sigmas=True,
        timestep_spacing="leading",
        timestep_type="continuous",
        steps_offset=1,
        sigma_min=0.002,
        sigma_max=700.0,
    )
    return OmniStableVideoDiffusionPipeline(
        vae=_vae(),
        image_encoder=clip_vision_encoder(layers=2, image_size=_SEEN, patch_size=_SEEN // 8, projects=True),
        unet=_unet(),
        scheduler=scheduler,
        feature_extractor=clip_image_processor(image_size=_SEEN),
    )


STABLE_VIDEO_DIFFUSION = prompted_case(
    "stable_video_diffusion",
    _pipeline,
    seed=180,
    leave_out=("prompt",),
    image=picture(width=16, height=16),
    width=16,
    height=16,
    num_frames=2,
    decode_chunk_size=1,
)
"""Picture to video with guidance: the frames are decoded in two chunks."""
