"""Cases of UNets without a prompt: random weights, a few ten thousand parameters, pictures of 16 x 16 pixels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    CMStochasticIterativeScheduler,
    DDIMScheduler,
    DDPMScheduler,
    PNDMScheduler,
    ScoreSdeVeScheduler,
    UNet2DModel,
    VQModel,
)

from omni_offload.testing import PipelineCase
from pipelines.ddpm.pipeline_ddpm import (
    OmniConsistencyModelPipeline,
    OmniDDIMPipeline,
    OmniDDPMPipeline,
    OmniLDMPipeline,
    OmniLDMSuperResolutionPipeline,
    OmniPNDMPipeline,
    OmniScoreSdeVePipeline,
)
from pipelines.tiny.components import ready
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline

__all__ = ["CONSISTENCY_MODEL", "DDIM", "DDPM", "LDM", "LDM_SUPER_RESOLUTION", "PNDM", "SCORE_SDE_VE"]


def _unet(**settings: Any) -> Any:
    defaults = {
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        "attention_head_dim": 8,
    }
    return ready(UNet2DModel(**{**defaults, **settings}))


def _vqvae() -> Any:
    return ready(
        VQModel(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=3,
            norm_num_groups=4,
            num_vq_embeddings=24,
        )
    )


def _case(name: str, cls: type, seed: int, parts: dict[str, Callable[[], Any]], **arguments: Any) -> PipelineCase:
    def make_pipeline() -> Any:
        return cls(**{part: make() for part, make in {"unet": _unet, **parts}.items()})

    def make_inputs(_pipeline: Any) -> dict[str, Any]:
        return {"num_inference_steps": 2, "output_type": "pt", "generator": generator(), **arguments}

    make = functools.partial(seeded_pipeline, seed, make_pipeline)
    return PipelineCase(name=name, make_pipeline=make, make_inputs=make_inputs, outputs=as_tensors)


DDPM = _case("ddpm", OmniDDPMPipeline, 57, {"scheduler": DDPMScheduler}, batch_size=2)
"""Two pictures."""

DDIM = _case("ddim", OmniDDIMPipeline, 58, {"scheduler": DDIMScheduler}, output_type="np")
"""A picture in fewer steps."""

PNDM = _case("pndm", OmniPNDMPipeline, 59, {"scheduler": functools.partial(PNDMScheduler, skip_prk_steps=True)}, output_type="np")
"""A picture by a solver of higher order."""

SCORE_SDE_VE = _case(
    "score_sde_ve",
    OmniScoreSdeVePipeline,
    60,
    {"scheduler": functools.partial(ScoreSdeVeScheduler, sigma_min=0.1, sigma_max=1.0)},
    output_type="np",
)
"""A picture with a correction before each step."""

CONSISTENCY_MODEL = _case(
    "consistency_model",
    OmniConsistencyModelPipeline,
    61,
    {"unet": functools.partial(_unet, num_class_embeds=10), "scheduler": CMStochasticIterativeScheduler},
    class_labels=3,
)
"""A picture of a class."""

LDM = _case("ldm", OmniLDMPipeline, 63, {"vqvae": _vqvae, "scheduler": DDIMScheduler}, output_type="np")
"""A picture from latents."""

LDM_SUPER_RESOLUTION = _case(
    "ldm_super_resolution",
    OmniLDMSuperResolutionPipeline,
    64,
    {"vqvae": _vqvae, "unet": functools.partial(_unet, in_channels=6), "scheduler": DDIMScheduler},
    image=torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16),
)
"""A picture of twice the size."""
