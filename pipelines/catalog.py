"""The pipelines of this package: one entry a family or a checkpoint."""

from pipelines.entry import PipelineEntry

__all__ = ["BUILT_IN"]

BUILT_IN = (
    PipelineEntry(
        "digits",
        pipeline="pipelines.flux.pipeline_flux:OmniFluxPipeline",
        cases=("pipelines.digits.cases:DIGITS",),
    ),
    PipelineEntry(
        "flux",
        pipeline="pipelines.flux.pipeline_flux:OmniFluxPipeline",
        cases=("pipelines.flux.cases:FLUX",),
    ),
    PipelineEntry(
        "wan",
        pipeline="pipelines.wan.pipeline_wan:OmniWanPipeline",
        cases=("pipelines.wan.cases:WAN_2_1", "pipelines.wan.cases:WAN_2_2", "pipelines.wan.cases:WAN_2_2_TI2V"),
    ),
    PipelineEntry(
        "wan_i2v",
        pipeline="pipelines.wan.pipeline_wan_i2v:OmniWanImageToVideoPipeline",
        cases=("pipelines.wan.cases:WAN_2_1_I2V", "pipelines.wan.cases:WAN_2_2_I2V"),
    ),
)
"""Upstream class names are taken from the class names here, so that no class is loaded to find one."""
