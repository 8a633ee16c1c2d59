"""How many checks and cases there are, and how many each registered pipeline runs: none goes missing unseen."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from contract_cases import ALWAYS, BFLOAT16, CASES, NOT_IN_BFLOAT16

import pipelines
from omni_offload.testing import Bench, all_checks, check_pipeline
from omni_offload.testing.report import Outcome
from omni_offload.testing.runner import rule_of

CHECKS = 66


#: A family adds its cases here, in one line of `COUNTED`.
COUNTED = {
    "allegro": 1,
    "amused": 1,
    "amused_img2img": 1,
    "amused_inpaint": 1,
    "animatediff": 1,
    "animatediff_controlnet": 1,
    "animatediff_pag": 1,
    "animatediff_sdxl": 1,
    "animatediff_sparse_controlnet": 1,
    "animatediff_v2v": 1,
    "animatediff_v2v_controlnet": 1,
    "audioldm": 1,
    "audioldm2": 1,
    "aura_flow": 1,
    "chroma": 1,
    "chroma_img2img": 1,
    "chroma_inpaint": 1,
    "chrono_edit": 1,
    "cogvideox": 1,
    "cogvideox_fun_control": 1,
    "cogvideox_i2v": 1,
    "cogvideox_v2v": 1,
    "cogview3_plus": 1,
    "cogview4": 1,
    "cogview4_control": 1,
    "consistency_model": 1,
    "cosmos2_5_predict": 1,
    "cosmos2_t2i": 1,
    "cosmos2_v2w": 1,
    "cosmos_t2w": 1,
    "cosmos_v2w": 1,
    "ddim": 1,
    "ddpm": 1,
    "deepfloyd_if": 2,
    "deepfloyd_if_img2img": 1,
    "deepfloyd_if_img2img_super_resolution": 1,
    "deepfloyd_if_inpainting": 1,
    "deepfloyd_if_inpainting_super_resolution": 1,
    "deepfloyd_if_super_resolution": 1,
    "digits": 1,
    "dit": 1,
    "easyanimate": 1,
    "easyanimate_inpaint": 1,
    "flux": 1,
    "flux2": 1,
    "flux2_klein": 2,
    "flux2_klein_inpaint": 1,
    "flux2_klein_kv": 1,
    "flux_control": 1,
    "flux_control_img2img": 1,
    "flux_control_inpaint": 1,
    "flux_controlnet": 2,
    "flux_controlnet_img2img": 1,
    "flux_controlnet_inpaint": 1,
    "flux_fill": 1,
    "flux_img2img": 1,
    "flux_inpaint": 1,
    "flux_kontext": 1,
    "flux_kontext_inpaint": 1,
    "flux_prior_redux": 1,
    "hidream": 1,
    "hunyuan_dit": 1,
    "hunyuan_dit_controlnet": 1,
    "hunyuan_dit_pag": 1,
    "hunyuan_skyreels_i2v": 1,
    "hunyuan_video": 1,
    "hunyuan_video_15": 1,
    "hunyuan_video_15_i2v": 1,
    "hunyuan_video_framepack": 1,
    "hunyuan_video_i2v": 1,
    "i2vgen_xl": 1,
    "kandinsky22": 1,
    "kandinsky22_controlnet": 1,
    "kandinsky22_controlnet_img2img": 1,
    "kandinsky22_decoder": 1,
    "kandinsky22_img2img": 1,
    "kandinsky22_img2img_combined": 1,
    "kandinsky22_inpaint": 1,
    "kandinsky22_inpaint_combined": 1,
    "kandinsky22_prior": 1,
    "kandinsky22_prior_emb2emb": 1,
    "kandinsky5_i2i": 1,
    "kandinsky5_i2v": 1,
    "kandinsky5_t2i": 1,
    "kandinsky5_t2v": 1,
    "latent_consistency": 1,
    "latent_consistency_img2img": 1,
    "latte": 1,
    "ldm": 1,
    "ldm_super_resolution": 1,
    "ltx": 1,
    "ltx2": 1,
    "ltx2_condition": 1,
    "ltx2_i2v": 1,
    "ltx2_in_context": 1,
    "ltx2_latent_upsample": 1,
    "ltx_condition": 1,
    "ltx_i2v": 1,
    "ltx_latent_upsample": 1,
    "ltx_long": 1,
    "lucy_edit": 1,
    "lumina": 1,
    "lumina2": 1,
    "marigold_depth": 1,
    "marigold_intrinsics": 1,
    "marigold_normals": 1,
    "mochi": 1,
    "pia": 1,
    "pixart_alpha": 1,
    "pixart_sigma": 1,
    "pixart_sigma_pag": 1,
    "pndm": 1,
    "prx": 1,
    "prx_pixel": 1,
    "qwen_image": 1,
    "qwen_image_controlnet": 2,
    "qwen_image_controlnet_inpaint": 1,
    "qwen_image_edit": 1,
    "qwen_image_edit_inpaint": 1,
    "qwen_image_edit_plus": 1,
    "qwen_image_img2img": 1,
    "qwen_image_inpaint": 1,
    "qwen_image_layered": 1,
    "sana": 1,
    "sana_controlnet": 1,
    "sana_i2v": 1,
    "sana_pag": 1,
    "sana_sprint": 1,
    "sana_sprint_img2img": 1,
    "sana_video": 1,
    "score_sde_ve": 1,
    "sd3": 1,
    "sd3_controlnet": 2,
    "sd3_controlnet_inpaint": 1,
    "sd3_img2img": 1,
    "sd3_inpaint": 1,
    "sd3_pag": 1,
    "sd3_pag_img2img": 1,
    "sdxl": 2,
    "sdxl_adapter": 1,
    "sdxl_controlnet": 2,
    "sdxl_controlnet_img2img": 1,
    "sdxl_controlnet_inpaint": 1,
    "sdxl_controlnet_pag": 1,
    "sdxl_controlnet_pag_img2img": 1,
    "sdxl_controlnet_union": 1,
    "sdxl_controlnet_union_img2img": 1,
    "sdxl_controlnet_union_inpaint": 1,
    "sdxl_img2img": 1,
    "sdxl_inpaint": 1,
    "sdxl_instruct_pix2pix": 1,
    "sdxl_pag": 1,
    "sdxl_pag_img2img": 1,
    "sdxl_pag_inpaint": 1,
    "skyreels_v2": 1,
    "skyreels_v2_forcing": 1,
    "skyreels_v2_forcing_i2v": 1,
    "skyreels_v2_forcing_v2v": 1,
    "skyreels_v2_i2v": 1,
    "stable_audio": 1,
    "stable_audio_3": 1,
    "stable_audio_3_audio_to_audio": 1,
    "stable_audio_3_inpaint": 1,
    "stable_cascade": 1,
    "stable_cascade_decoder": 1,
    "stable_cascade_prior": 1,
    "stable_diffusion": 4,
    "stable_diffusion_adapter": 1,
    "stable_diffusion_controlnet": 2,
    "stable_diffusion_controlnet_img2img": 1,
    "stable_diffusion_controlnet_inpaint": 1,
    "stable_diffusion_controlnet_pag": 1,
    "stable_diffusion_controlnet_pag_inpaint": 1,
    "stable_diffusion_depth2img": 1,
    "stable_diffusion_gligen": 1,
    "stable_diffusion_image_variation": 1,
    "stable_diffusion_img2img": 1,
    "stable_diffusion_inpaint": 1,
    "stable_diffusion_instruct_pix2pix": 1,
    "stable_diffusion_latent_upscale": 1,
    "stable_diffusion_ldm3d": 1,
    "stable_diffusion_pag": 1,
    "stable_diffusion_pag_img2img": 1,
    "stable_diffusion_pag_inpaint": 1,
    "stable_diffusion_panorama": 1,
    "stable_diffusion_sag": 1,
    "stable_diffusion_upscale": 1,
    "stable_unclip": 1,
    "stable_unclip_img2img": 1,
    "svd": 1,
    "text_to_video_sd": 1,
    "video_to_video_sd": 1,
    "wan": 3,
    "wan_animate": 1,
    "wan_i2v": 2,
    "wan_v2v": 1,
    "wan_vace": 1,
    "z_image": 1,
    "z_image_img2img": 1,
    "z_image_inpaint": 1,
    "z_image_omni": 1,
}

ROOT = Path(__file__).parents[2]


def test_number_of_cases():
    """Every registered pipeline has so many cases, each with a name of its own, and all of them run the contract."""
    found = {name: len(entry.load_cases()) for name, entry in pipelines.registered().items()}
    assert found == COUNTED
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) == sum(COUNTED.values())
    assert len(BFLOAT16) == len(CASES)
    assert set(NOT_IN_BFLOAT16) <= set(names)


@pytest.mark.parametrize("package", ["omni_offload", "pipelines"])
def test_shipped_code_raises_what_it_means(package):
    """No shipped module asserts: python -O would leave the check out, and no caller could tell what was wrong."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 10
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_number_of_checks():
    """The list holds so many checks, each once."""
    assert len(all_checks()) == len(set(all_checks())) == len({check.__name__ for check in all_checks()}) == CHECKS


def test_form_of_checks():
    """A check is a function named check_*, takes the bench, and its first line is its rule."""
    for check in all_checks():
        assert check.__name__.startswith("check_")
        assert [p.annotation for p in inspect.signature(check).parameters.values()] == [Bench]
        assert rule_of(check).endswith("."), check.__name__


def test_the_matrix_names_every_check():
    """The page that says what the contract checks names every check, none that there is not, and every invariant."""
    page = (ROOT / "docs" / "contract_checks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(check_(?!pipeline)\w+)`", page)) == {check.__name__ for check in all_checks()}
    assert re.findall(r"^\| (\d+)\. ", page, re.MULTILINE) == [str(number) for number in range(1, 12)]


def test_no_check_is_left_out_of_the_list():
    """Every function named check_* in the checks' modules is in the list."""
    from omni_offload.testing import checks

    modules = {inspect.getmodule(check) for check in all_checks()}
    found = {value for module in modules for name, value in vars(module).items() if name.startswith("check_") and callable(value)}
    assert found == set(checks.CHECKS)


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS["module"] else pytest.param(name, marks=pytest.mark.exhaustive) for name in pipelines.registered()]
)
def test_every_check_is_reported(name):
    """A report has one line for every check of the list, also where it was not asked for."""
    case = pipelines.registered()[name].load_cases()[0]
    report = check_pipeline(case, checks=["check_protocols"])
    assert [result.check for result in report.results] == [check.__name__ for check in all_checks()]
    assert report.named(Outcome.PASSED) == ("check_protocols",)
    assert len(report.named(Outcome.NOT_RUN)) == CHECKS - 1
