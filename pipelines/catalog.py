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
        "flux_controlnet",
        pipeline="pipelines.flux.pipeline_controlnet:OmniFluxControlNetPipeline",
        cases=("pipelines.flux.cases:FLUX_CONTROLNET", "pipelines.flux.cases:FLUX_MULTI_CONTROLNET"),
    ),
    PipelineEntry(
        "flux_img2img",
        pipeline="pipelines.flux.pipeline_flux:OmniFluxImg2ImgPipeline",
        cases=("pipelines.flux.cases:FLUX_IMG2IMG",),
    ),
    PipelineEntry(
        "flux_kontext",
        pipeline="pipelines.flux.pipeline_flux:OmniFluxKontextPipeline",
        cases=("pipelines.flux.cases:FLUX_KONTEXT",),
    ),
    PipelineEntry(
        "ltx2",
        pipeline="pipelines.ltx2.pipeline_ltx2:OmniLTX2Pipeline",
        cases=("pipelines.ltx2.cases:LTX2",),
    ),
    PipelineEntry(
        "qwen_image",
        pipeline="pipelines.qwen_image.pipeline_qwen_image:OmniQwenImagePipeline",
        cases=("pipelines.qwen_image.cases:QWEN_IMAGE",),
    ),
    PipelineEntry(
        "sd3",
        pipeline="pipelines.sd3.pipeline_sd3:OmniStableDiffusion3Pipeline",
        cases=("pipelines.sd3.cases:SD3",),
    ),
    PipelineEntry(
        "sdxl",
        pipeline="pipelines.sdxl.pipeline_sdxl:OmniStableDiffusionXLPipeline",
        cases=("pipelines.sdxl.cases:TEXT_TO_IMAGE", "pipelines.sdxl.cases:TEXT_TO_IMAGE_FP16"),
    ),
    PipelineEntry(
        "sdxl_img2img",
        pipeline="pipelines.sdxl.pipeline_sdxl:OmniStableDiffusionXLImg2ImgPipeline",
        cases=("pipelines.sdxl.cases:IMG2IMG_FP16",),
    ),
    PipelineEntry(
        "stable_audio",
        pipeline="pipelines.stable_audio.pipeline_stable_audio:OmniStableAudioPipeline",
        cases=("pipelines.stable_audio.cases:STABLE_AUDIO",),
    ),
    PipelineEntry(
        "stable_diffusion",
        pipeline="pipelines.stable_diffusion.pipeline_stable_diffusion:OmniStableDiffusionPipeline",
        cases=(
            "pipelines.stable_diffusion.cases:TEXT_TO_IMAGE",
            "pipelines.stable_diffusion.cases:IP_ADAPTER",
            "pipelines.stable_diffusion.cases:SAFETY_CHECKER",
        ),
    ),
    PipelineEntry(
        "stable_diffusion_controlnet",
        pipeline="pipelines.stable_diffusion.pipeline_controlnet:OmniStableDiffusionControlNetPipeline",
        cases=("pipelines.stable_diffusion.cases:CONTROLNET", "pipelines.stable_diffusion.cases:MULTI_CONTROLNET"),
    ),
    PipelineEntry(
        "stable_diffusion_img2img",
        pipeline="pipelines.stable_diffusion.pipeline_stable_diffusion:OmniStableDiffusionImg2ImgPipeline",
        cases=("pipelines.stable_diffusion.cases:IMG2IMG",),
    ),
    PipelineEntry(
        "stable_diffusion_inpaint",
        pipeline="pipelines.stable_diffusion.pipeline_stable_diffusion:OmniStableDiffusionInpaintPipeline",
        cases=("pipelines.stable_diffusion.cases:INPAINT",),
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
