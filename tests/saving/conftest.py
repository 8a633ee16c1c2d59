"""Every registered case, saved, loaded and copied; after each test nothing may be left on the device, and no race."""

import types
from pathlib import Path

import pytest
import torch
from torch import nn

import pipelines

FAST = ("flux", "wan_2_2_i2v")
"""The cases of the fast suite: one of the core's rotation, one that drives its offload itself."""


_NO_VIDEO_PROCESSOR = "'NoneType' object has no attribute '_auto_class'"

NOT_SAVED = {
    "flux_multi_controlnet": "'FluxMultiControlNetModel' object has no attribute 'save_config'",
    "kandinsky5_i2i": _NO_VIDEO_PROCESSOR,
    "qwen_image_edit": _NO_VIDEO_PROCESSOR,
    "qwen_image_edit_inpaint": _NO_VIDEO_PROCESSOR,
    "qwen_image_edit_plus": _NO_VIDEO_PROCESSOR,
    "qwen_image_layered": _NO_VIDEO_PROCESSOR,
    "sd3_multi_controlnet": "'SD3MultiControlNetModel' object has no attribute 'save_config'",
}
"""Cases that diffusers itself cannot save, and its message; some for their processor, which has no part for videos: that takes torchvision."""

_NO_GUARDRAIL = "`cosmos_guardrail` is not installed"
_NO_VQGAN = "`diffusers` has no class `PaellaVQModel`"
_OTHER_WIDTH = "context_embedder_2.linear_1.bias expected shape"

NOT_LOADED = {
    "allegro": "Decoding without tiling has not been implemented yet",
    "cosmos2_5_predict": _NO_GUARDRAIL,
    "cosmos2_text_to_image": _NO_GUARDRAIL,
    "cosmos2_video_to_world": _NO_GUARDRAIL,
    "cosmos_text_to_world": _NO_GUARDRAIL,
    "cosmos_video_to_world": _NO_GUARDRAIL,
    "deepfloyd_if_img2img_super_resolution": "were passed",
    "deepfloyd_if_watermark": "'IFSafetyChecker' object has no attribute 'all_tied_weights_keys'",
    "hunyuan_video_15": _OTHER_WIDTH,
    "hunyuan_video_15_i2v": _OTHER_WIDTH,
    "qwen_image_multi_controlnet": "missing 1 required positional argument: 'controlnets'",
    "stable_cascade": _NO_VQGAN,
    "stable_cascade_decoder": _NO_VQGAN,
    "stable_diffusion_ip_adapter": "'NoneType' object has no attribute 'image_projection_layers'",
}
"""Cases that diffusers saves without what loading or their call needs (an IP-Adapter is to be loaded again), and its message."""

LOADED_OTHERWISE = ("kandinsky5_i2v", "kandinsky5_t2i", "kandinsky5_t2v")
"""Cases that diffusers saves without a setting on which their outputs depend."""


def every_case(*, but=()):
    """Every case of every registered pipeline, each once; all but two in the exhaustive run."""
    cases = {case.name: case for entry in pipelines.registered().values() for case in entry.load_cases() if case.name not in but}
    return [pytest.param(case, id=name, marks=() if name in FAST else pytest.mark.exhaustive) for name, case in sorted(cases.items())]


def modules(pipeline):
    return {name: component for name, component in pipeline.components.items() if isinstance(component, nn.Module)}


def tensors(pipeline):
    """Each component's parameters and buffers, by name."""
    return {
        f"{name}.{key}": tensor
        for name, module in modules(pipeline).items()
        for key, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    }


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def aligned(pipeline):
    """Put every weight into memory of its own: files are mapped unaligned, which changes the last digit of results."""
    for tensor in {id(tensor): tensor for tensor in tensors(pipeline).values()}.values():
        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def at_home(case, pipeline):
    """Take back to the host what a scheduler keeps where it ran last: upstream's of these cases runs nowhere else then (`check_cycles`)."""
    if "check_cycles" in case.expected_failures:
        for name, value in vars(pipeline.scheduler).items():
            if isinstance(value, torch.Tensor):
                setattr(pipeline.scheduler, name, value.cpu())
    return pipeline


def call(case, pipeline):
    return [tensor.cpu() for tensor in case.outputs(pipeline(**case.make_inputs(pipeline)))]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def hooked(root):
    """The modules in which something of the framework stands."""
    ours = ("_omni_hook_registry", "__getstate__", "forward")
    return [module for module in root.modules() if any(name in vars(module) for name in ours)]


@pytest.fixture(scope="session")
def kit():
    functions = (modules, tensors, files, aligned, at_home, call, same, hooked)
    return types.SimpleNamespace(**{function.__name__: function for function in functions})


@pytest.fixture(scope="session")
def flux():
    return pipelines.registered()["flux"].load_cases()[0]


@pytest.fixture(scope="session")
def reference(kit):
    """Return a function that makes a case's files and outputs without offload, once."""
    made = {}

    def reference(case, folder):
        if case.name not in made:
            pipeline = kit.aligned(case.make_pipeline())
            outputs = kit.call(case, pipeline)  # first: a tokenizer saves how it was used last
            pipeline.save_pretrained(folder)
            made[case.name] = kit.files(folder), outputs
        return made[case.name]

    return reference


@pytest.fixture(autouse=True)
def leaves_nothing(nothing_left):
    """Every test here ends with an empty device, no pinned byte and no race."""
