"""Cases of both pipelines."""

from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel

from acme_diffusion.ddpm import OmniDDPMPipeline
from acme_diffusion.waves import WIDTH, WavesPipeline
from omni_offload.testing import PipelineCase

__all__ = ["DDPM", "WAVES"]


def _make_waves() -> WavesPipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return WavesPipeline()


def _waves_inputs(_pipeline: Any) -> dict[str, Any]:
    noise = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    return {"ids": torch.arange(6).view(1, 6), "noise": noise}


def _make_ddpm() -> OmniDDPMPipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        unet = UNet2DModel(
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
        )
    pipeline = OmniDDPMPipeline(unet=unet.eval(), scheduler=DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _ddpm_inputs(_pipeline: Any) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(1), "num_inference_steps": 2, "output_type": "np"}


WAVES = PipelineCase(name="acme_waves", make_pipeline=_make_waves, make_inputs=_waves_inputs, outputs=lambda result: [result])
DDPM = PipelineCase(
    name="acme_ddpm",
    make_pipeline=_make_ddpm,
    make_inputs=_ddpm_inputs,
    outputs=lambda result: [torch.from_numpy(result.images)],
)
