"""AnimateDiff cases: random weights, two hundred thousand parameters, three frames of 16 x 16 pixels."""

import functools
from collections.abc import Callable
from typing import Any

from diffusers import DDIMScheduler, ModelMixin, MotionAdapter, SparseControlNetModel

from pipelines.animatediff.pipeline_animatediff import (
    OmniAnimateDiffPAGPipeline,
    OmniAnimateDiffPipeline,
    OmniAnimateDiffVideoToVideoPipeline,
    OmniPIAPipeline,
)
from pipelines.animatediff.pipeline_controlnet import (
    OmniAnimateDiffControlNetPipeline,
    OmniAnimateDiffSparseControlNetPipeline,
    OmniAnimateDiffVideoToVideoControlNetPipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready, without_spread
from pipelines.tiny.inputs import picture
from pipelines.tiny.logs import NOTHING_IN_FLOAT32, keep_back
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import control_net, unet_2d
from pipelines.tiny.videos import clip

__all__ = [
    "ANIMATEDIFF",
    "ANIMATEDIFF_CONTROLNET",
    "ANIMATEDIFF_PAG",
    "ANIMATEDIFF_SPARSE_CONTROLNET",
    "ANIMATEDIFF_VIDEO_TO_VIDEO",
    "ANIMATEDIFF_VIDEO_TO_VIDEO_CONTROLNET",
    "PIA",
]

_FRAMES = 3
_SIZE = 16


def _motion(**settings: Any) -> Any:
    return ready(
        MotionAdapter(
            block_out_channels=(8, 16), motion_layers_per_block=1, motion_norm_num_groups=4, motion_num_attention_heads=2, **settings
        )
    )


def _sparse_control_net() -> Any:
    """Return a ControlNet with layers for time; `ready` fills its convolutions that begin as zeros with noise."""
    return ready(
        SparseControlNetModel(
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=TEXT_WIDTH,
            attention_head_dim=2,
            conditioning_embedding_out_channels=(8, 16),
            motion_num_attention_heads=2,
        )
    )


def _certain_vae() -> Any:
    """Return a VAE for a pipeline that draws from encodings with no generator, and does not shift them."""
    vae = without_spread(autoencoder_kl(widths=(8, 16)))
    vae.register_to_config(scaling_factor=1 / vae.config.latents_mean[0])
    return vae


def _pipeline(cls: Any, **parts: Callable[[], Any]) -> Any:
    """Return a pipeline; what its UNet takes over from the adapter is in evaluation mode, like all else."""
    keep_back(ModelMixin, NOTHING_IN_FLOAT32)
    defaults: dict[str, Callable[[], Any]] = {
        "vae": functools.partial(autoencoder_kl, widths=(8, 16)),
        "text_encoder": functools.partial(clip_text_encoder, layers=2),
        "tokenizer": clip_tokenizer,
        "unet": unet_2d,
        "motion_adapter": _motion,
        "scheduler": functools.partial(DDIMScheduler, beta_schedule="linear", steps_offset=1, clip_sample=False),
    }
    pipeline = cls(**{name: make() for name, make in {**defaults, **parts}.items()})
    pipeline.unet.eval()
    return pipeline


def _pia() -> Any:
    """Return a pipeline whose UNet sees the picture and a mask too: its adapter brings the weights for that."""
    return _pipeline(OmniPIAPipeline, motion_adapter=functools.partial(_motion, conv_in_channels=9))


_case = functools.partial(prompted_case, negative_prompt="blurry", height=_SIZE, width=_SIZE)
_CONTROL: dict[str, Any] = {"conditioning_frames": clip(_FRAMES, width=_SIZE, height=_SIZE), "controlnet_conditioning_scale": 0.7}
_VIDEO: dict[str, Any] = {"video": clip(_FRAMES, width=_SIZE, height=_SIZE), "strength": 0.9, "num_inference_steps": 3}

ANIMATEDIFF = _case("animatediff", lambda: _pipeline(OmniAnimateDiffPipeline), seed=190, num_frames=_FRAMES, decode_chunk_size=2)
"""Text to video, the frames of which are decoded in two chunks."""

ANIMATEDIFF_PAG = _case("animatediff_pag", lambda: _pipeline(OmniAnimateDiffPAGPipeline), seed=191, num_frames=_FRAMES)
"""Text to video with both kinds of guidance."""

ANIMATEDIFF_VIDEO_TO_VIDEO = _case("animatediff_v2v", lambda: _pipeline(OmniAnimateDiffVideoToVideoPipeline), seed=192, **_VIDEO)
"""Text and video to video: two of three steps."""

PIA = _case("pia", _pia, seed=193, image=picture(width=_SIZE, height=_SIZE), num_frames=_FRAMES)
"""Text and a picture to video, by a UNet that sees the picture."""

ANIMATEDIFF_CONTROLNET = _case(
    "animatediff_controlnet",
    lambda: _pipeline(OmniAnimateDiffControlNetPipeline, controlnet=control_net),
    seed=194,
    num_frames=_FRAMES,
    **_CONTROL,
)
"""Text and control pictures to video."""

ANIMATEDIFF_VIDEO_TO_VIDEO_CONTROLNET = _case(
    "animatediff_v2v_controlnet",
    lambda: _pipeline(OmniAnimateDiffVideoToVideoControlNetPipeline, controlnet=lambda: [control_net() for _ in range(2)]),
    seed=195,
    **_VIDEO,
    conditioning_frames=[_CONTROL["conditioning_frames"]] * 2,
    controlnet_conditioning_scale=[0.7, 0.4],
)
"""Text, video and two videos of control pictures to video, by two ControlNets."""

ANIMATEDIFF_SPARSE_CONTROLNET = _case(
    "animatediff_sparse_controlnet",
    lambda: _pipeline(OmniAnimateDiffSparseControlNetPipeline, controlnet=_sparse_control_net, vae=_certain_vae),
    seed=196,
    num_frames=_FRAMES,
    conditioning_frames=clip(2, width=_SIZE, height=_SIZE),
    controlnet_frame_indices=[0, 2],
    controlnet_conditioning_scale=0.7,
)
"""Text and control pictures for the first and the last frame to video."""
