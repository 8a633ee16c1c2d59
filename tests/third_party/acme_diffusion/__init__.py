"""Acme's pipelines. Importing this imports no model: the entries name what is loaded when it is asked for."""

from pipelines import PipelineEntry

__all__ = ["DDPM", "WAVES"]

WAVES = PipelineEntry("acme_waves", pipeline="acme_diffusion.waves:WavesPipeline", cases=("acme_diffusion.cases:WAVES",))
DDPM = PipelineEntry("acme_ddpm", pipeline="acme_diffusion.ddpm:OmniDDPMPipeline", cases=("acme_diffusion.cases:DDPM",))
