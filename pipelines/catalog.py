"""The pipelines of this package: one entry a family or a checkpoint."""

from pipelines.entry import PipelineEntry

__all__ = ["BUILT_IN"]


def _entry(name: str, pipeline: str, *cases: str) -> PipelineEntry:
    """Return an entry whose class and cases are in this package, each as `"<module>:<name>"`."""
    return PipelineEntry(name, pipeline=f"pipelines.{pipeline}", cases=tuple(f"pipelines.{case}" for case in cases))


BUILT_IN = (
    _entry("allegro", "allegro.pipeline_allegro:OmniAllegroPipeline", "allegro.cases:ALLEGRO"),
    _entry("amused", "amused.pipeline_amused:OmniAmusedPipeline", "amused.cases:AMUSED"),
    _entry("amused_img2img", "amused.pipeline_amused:OmniAmusedImg2ImgPipeline", "amused.cases:AMUSED_IMG2IMG"),
    _entry("amused_inpaint", "amused.pipeline_amused:OmniAmusedInpaintPipeline", "amused.cases:AMUSED_INPAINT"),
    _entry("aura_flow", "aura_flow.pipeline_aura_flow:OmniAuraFlowPipeline", "aura_flow.cases:AURA_FLOW"),
    _entry("cogvideox", "cogvideox.pipeline_cogvideox:OmniCogVideoXPipeline", "cogvideox.cases:COGVIDEOX"),
    _entry(
        "cogvideox_fun_control",
        "cogvideox.pipeline_cogvideox:OmniCogVideoXFunControlPipeline",
        "cogvideox.cases:COGVIDEOX_FUN_CONTROL",
    ),
    _entry("cogvideox_i2v", "cogvideox.pipeline_cogvideox:OmniCogVideoXImageToVideoPipeline", "cogvideox.cases:COGVIDEOX_IMAGE_TO_VIDEO"),
    _entry("cogvideox_v2v", "cogvideox.pipeline_cogvideox:OmniCogVideoXVideoToVideoPipeline", "cogvideox.cases:COGVIDEOX_VIDEO_TO_VIDEO"),
    _entry("consistency_model", "ddpm.pipeline_ddpm:OmniConsistencyModelPipeline", "ddpm.cases:CONSISTENCY_MODEL"),
    _entry("ddim", "ddpm.pipeline_ddpm:OmniDDIMPipeline", "ddpm.cases:DDIM"),
    _entry("ddpm", "ddpm.pipeline_ddpm:OmniDDPMPipeline", "ddpm.cases:DDPM"),
    _entry("digits", "flux.pipeline_flux:OmniFluxPipeline", "digits.cases:DIGITS"),
    _entry("dit", "dit.pipeline_dit:OmniDiTPipeline", "dit.cases:DIT"),
    _entry("flux", "flux.pipeline_flux:OmniFluxPipeline", "flux.cases:FLUX"),
    _entry("flux2", "flux2.pipeline_flux2:OmniFlux2Pipeline", "flux2.cases:FLUX2"),
    _entry("flux2_klein", "flux2.pipeline_flux2:OmniFlux2KleinPipeline", "flux2.cases:FLUX2_KLEIN", "flux2.cases:FLUX2_KLEIN_EDIT"),
    _entry("flux2_klein_inpaint", "flux2.pipeline_flux2:OmniFlux2KleinInpaintPipeline", "flux2.cases:FLUX2_KLEIN_INPAINT"),
    _entry("flux2_klein_kv", "flux2.pipeline_flux2:OmniFlux2KleinKVPipeline", "flux2.cases:FLUX2_KLEIN_KV"),
    _entry(
        "flux_controlnet",
        "flux.pipeline_controlnet:OmniFluxControlNetPipeline",
        "flux.cases:FLUX_CONTROLNET",
        "flux.cases:FLUX_MULTI_CONTROLNET",
    ),
    _entry("flux_img2img", "flux.pipeline_flux:OmniFluxImg2ImgPipeline", "flux.cases:FLUX_IMG2IMG"),
    _entry("flux_kontext", "flux.pipeline_flux:OmniFluxKontextPipeline", "flux.cases:FLUX_KONTEXT"),
    _entry("hidream", "hidream.pipeline_hidream:OmniHiDreamImagePipeline", "hidream.cases:HIDREAM"),
    _entry("hunyuan_dit", "hunyuan_dit.pipeline_hunyuan_dit:OmniHunyuanDiTPipeline", "hunyuan_dit.cases:HUNYUAN_DIT"),
    _entry(
        "hunyuan_dit_controlnet",
        "hunyuan_dit.pipeline_hunyuan_dit:OmniHunyuanDiTControlNetPipeline",
        "hunyuan_dit.cases:HUNYUAN_DIT_CONTROLNET",
    ),
    _entry("hunyuan_dit_pag", "hunyuan_dit.pipeline_hunyuan_dit:OmniHunyuanDiTPAGPipeline", "hunyuan_dit.cases:HUNYUAN_DIT_PAG"),
    _entry(
        "hunyuan_skyreels_i2v",
        "hunyuan_video.pipeline_hunyuan_video:OmniHunyuanSkyreelsImageToVideoPipeline",
        "hunyuan_video.cases:HUNYUAN_SKYREELS_IMAGE_TO_VIDEO",
    ),
    _entry("hunyuan_video", "hunyuan_video.pipeline_hunyuan_video:OmniHunyuanVideoPipeline", "hunyuan_video.cases:HUNYUAN_VIDEO"),
    _entry(
        "hunyuan_video_15",
        "hunyuan_video15.pipeline_hunyuan_video15:OmniHunyuanVideo15Pipeline",
        "hunyuan_video15.cases:HUNYUAN_VIDEO_15",
    ),
    _entry(
        "hunyuan_video_15_i2v",
        "hunyuan_video15.pipeline_hunyuan_video15:OmniHunyuanVideo15ImageToVideoPipeline",
        "hunyuan_video15.cases:HUNYUAN_VIDEO_15_IMAGE_TO_VIDEO",
    ),
    _entry(
        "hunyuan_video_framepack",
        "hunyuan_video.pipeline_hunyuan_video:OmniHunyuanVideoFramepackPipeline",
        "hunyuan_video.cases:HUNYUAN_VIDEO_FRAMEPACK",
    ),
    _entry(
        "hunyuan_video_i2v",
        "hunyuan_video.pipeline_hunyuan_video:OmniHunyuanVideoImageToVideoPipeline",
        "hunyuan_video.cases:HUNYUAN_VIDEO_IMAGE_TO_VIDEO",
    ),
    _entry("latte", "latte.pipeline_latte:OmniLattePipeline", "latte.cases:LATTE"),
    _entry("ldm", "ddpm.pipeline_ddpm:OmniLDMPipeline", "ddpm.cases:LDM"),
    _entry("ldm_super_resolution", "ddpm.pipeline_ddpm:OmniLDMSuperResolutionPipeline", "ddpm.cases:LDM_SUPER_RESOLUTION"),
    _entry("ltx", "ltx.pipeline_ltx:OmniLTXPipeline", "ltx.cases:LTX"),
    _entry("ltx2", "ltx2.pipeline_ltx2:OmniLTX2Pipeline", "ltx2.cases:LTX2"),
    _entry("ltx_condition", "ltx.pipeline_ltx:OmniLTXConditionPipeline", "ltx.cases:LTX_CONDITION"),
    _entry("ltx_i2v", "ltx.pipeline_ltx:OmniLTXImageToVideoPipeline", "ltx.cases:LTX_IMAGE_TO_VIDEO"),
    _entry("ltx_latent_upsample", "ltx.pipeline_ltx:OmniLTXLatentUpsamplePipeline", "ltx.cases:LTX_LATENT_UPSAMPLE"),
    _entry("lucy_edit", "wan.pipeline_wan:OmniLucyEditPipeline", "wan.cases_video:LUCY_EDIT"),
    _entry("mochi", "mochi.pipeline_mochi:OmniMochiPipeline", "mochi.cases:MOCHI"),
    _entry("pixart_alpha", "pixart.pipeline_pixart:OmniPixArtAlphaPipeline", "pixart.cases:ALPHA"),
    _entry("pixart_sigma", "pixart.pipeline_pixart:OmniPixArtSigmaPipeline", "pixart.cases:SIGMA"),
    _entry("pixart_sigma_pag", "pixart.pipeline_pixart:OmniPixArtSigmaPAGPipeline", "pixart.cases:SIGMA_PAG"),
    _entry("pndm", "ddpm.pipeline_ddpm:OmniPNDMPipeline", "ddpm.cases:PNDM"),
    _entry("qwen_image", "qwen_image.pipeline_qwen_image:OmniQwenImagePipeline", "qwen_image.cases:QWEN_IMAGE"),
    _entry("sana", "sana.pipeline_sana:OmniSanaPipeline", "sana.cases:SANA"),
    _entry("sana_controlnet", "sana.pipeline_sana:OmniSanaControlNetPipeline", "sana.cases:SANA_CONTROLNET"),
    _entry("sana_pag", "sana.pipeline_sana:OmniSanaPAGPipeline", "sana.cases:SANA_PAG"),
    _entry("sana_sprint", "sana.pipeline_sana:OmniSanaSprintPipeline", "sana.cases:SANA_SPRINT"),
    _entry("sana_sprint_img2img", "sana.pipeline_sana:OmniSanaSprintImg2ImgPipeline", "sana.cases:SANA_SPRINT_IMG2IMG"),
    _entry("score_sde_ve", "ddpm.pipeline_ddpm:OmniScoreSdeVePipeline", "ddpm.cases:SCORE_SDE_VE"),
    _entry("sd3", "sd3.pipeline_sd3:OmniStableDiffusion3Pipeline", "sd3.cases:SD3"),
    _entry("sdxl", "sdxl.pipeline_sdxl:OmniStableDiffusionXLPipeline", "sdxl.cases:TEXT_TO_IMAGE", "sdxl.cases:TEXT_TO_IMAGE_FP16"),
    _entry("sdxl_img2img", "sdxl.pipeline_sdxl:OmniStableDiffusionXLImg2ImgPipeline", "sdxl.cases:IMG2IMG_FP16"),
    _entry("skyreels_v2", "skyreels_v2.pipeline_skyreels_v2:OmniSkyReelsV2Pipeline", "skyreels_v2.cases:SKYREELS_V2"),
    _entry(
        "skyreels_v2_forcing",
        "skyreels_v2.pipeline_skyreels_v2:OmniSkyReelsV2DiffusionForcingPipeline",
        "skyreels_v2.cases:SKYREELS_V2_FORCING",
    ),
    _entry(
        "skyreels_v2_forcing_i2v",
        "skyreels_v2.pipeline_skyreels_v2:OmniSkyReelsV2DiffusionForcingImageToVideoPipeline",
        "skyreels_v2.cases:SKYREELS_V2_FORCING_IMAGE_TO_VIDEO",
    ),
    _entry(
        "skyreels_v2_forcing_v2v",
        "skyreels_v2.pipeline_skyreels_v2:OmniSkyReelsV2DiffusionForcingVideoToVideoPipeline",
        "skyreels_v2.cases:SKYREELS_V2_FORCING_VIDEO_TO_VIDEO",
    ),
    _entry(
        "skyreels_v2_i2v",
        "skyreels_v2.pipeline_skyreels_v2:OmniSkyReelsV2ImageToVideoPipeline",
        "skyreels_v2.cases:SKYREELS_V2_IMAGE_TO_VIDEO",
    ),
    _entry("stable_audio", "stable_audio.pipeline_stable_audio:OmniStableAudioPipeline", "stable_audio.cases:STABLE_AUDIO"),
    _entry(
        "stable_diffusion",
        "stable_diffusion.pipeline_stable_diffusion:OmniStableDiffusionPipeline",
        "stable_diffusion.cases:TEXT_TO_IMAGE",
        "stable_diffusion.cases:IP_ADAPTER",
        "stable_diffusion.cases:SAFETY_CHECKER",
    ),
    _entry(
        "stable_diffusion_controlnet",
        "stable_diffusion.pipeline_controlnet:OmniStableDiffusionControlNetPipeline",
        "stable_diffusion.cases:CONTROLNET",
        "stable_diffusion.cases:MULTI_CONTROLNET",
    ),
    _entry(
        "stable_diffusion_img2img",
        "stable_diffusion.pipeline_stable_diffusion:OmniStableDiffusionImg2ImgPipeline",
        "stable_diffusion.cases:IMG2IMG",
    ),
    _entry(
        "stable_diffusion_inpaint",
        "stable_diffusion.pipeline_stable_diffusion:OmniStableDiffusionInpaintPipeline",
        "stable_diffusion.cases:INPAINT",
    ),
    _entry("wan", "wan.pipeline_wan:OmniWanPipeline", "wan.cases:WAN_2_1", "wan.cases:WAN_2_2", "wan.cases:WAN_2_2_TI2V"),
    _entry("wan_i2v", "wan.pipeline_wan_i2v:OmniWanImageToVideoPipeline", "wan.cases:WAN_2_1_I2V", "wan.cases:WAN_2_2_I2V"),
    _entry("wan_v2v", "wan.pipeline_wan:OmniWanVideoToVideoPipeline", "wan.cases_video:WAN_VIDEO_TO_VIDEO"),
    _entry("wan_vace", "wan.pipeline_wan:OmniWanVACEPipeline", "wan.cases_video:WAN_VACE"),
    _entry("z_image", "z_image.pipeline_z_image:OmniZImagePipeline", "z_image.cases:Z_IMAGE"),
    _entry("z_image_img2img", "z_image.pipeline_z_image:OmniZImageImg2ImgPipeline", "z_image.cases:Z_IMAGE_IMG2IMG"),
    _entry("z_image_inpaint", "z_image.pipeline_z_image:OmniZImageInpaintPipeline", "z_image.cases:Z_IMAGE_INPAINT"),
)
"""Upstream class names are taken from the class names here, so that no class is loaded to find one."""
