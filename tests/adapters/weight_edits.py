"""What changes the weights of a pipeline: diffusers', peft's and torch's own calls, one table of them."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from diffusers.models.attention_processor import AttnProcessor
from safetensors.torch import save_file
from torch import nn

RANK = 4
FILES = {"denoiser": ("to_q", "to_k", "to_v", "to_out.0", "proj_out"), "text_encoder": ("q_proj", "v_proj", "out_proj")}


# ---- what adapters are made of ---------------------------------------------------------------------------------------------------


def denoiser(pipe):
    return pipe.transformer if getattr(pipe, "transformer", None) is not None else pipe.unet


def prefix(pipe):
    return "transformer" if getattr(pipe, "transformer", None) is not None else "unet"


def factors(module, ends, path, seed, rank):
    """Random A and B for every linear layer whose name ends so."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, layer in module.named_modules():
        base = getattr(layer, "base_layer", layer)
        if isinstance(base, nn.Linear) and name.endswith(ends):
            made[f"{path}.{name}.lora_A.weight"] = torch.randn(rank, base.in_features, generator=random) * 0.2
            made[f"{path}.{name}.lora_B.weight"] = torch.randn(base.out_features, rank, generator=random) * 0.2
    return made


def lora(pipe, seed=1, rank=RANK, encoder=False):
    made = factors(denoiser(pipe), FILES["denoiser"], prefix(pipe), seed, rank)
    if encoder:
        made |= factors(pipe.text_encoder, FILES["text_encoder"], "text_encoder", seed + 100, rank)
    return made


def load(name="one", **settings):
    return lambda pipe: pipe.load_lora_weights(lora(pipe, **settings), adapter_name=name)


def load_folder(pipe):
    with tempfile.TemporaryDirectory() as folder:
        save_file(lora(pipe, seed=7), Path(folder) / "pytorch_lora_weights.safetensors")
        pipe.load_lora_weights(folder, adapter_name="file")


def load_two(pipe):
    load("one", seed=1)(pipe)
    load("two", seed=2, rank=8)(pipe)
    pipe.set_adapters(["one", "two"], [0.7, 0.3])


def chain(*edits):
    def run(pipe):
        extra = {}
        for edit in edits:
            extra.update(edit(pipe) or {})
        return extra

    run.parts = edits
    return run


def call(method, *args, **kwargs):
    return lambda pipe: getattr(pipe, method)(*args, **kwargs) and None


def on(path, method, *args, **kwargs):
    def run(pipe):
        part = denoiser(pipe) if path == "denoiser" else getattr(pipe, path)
        getattr(part, method)(*args, **kwargs)

    return run


def scale(value):
    """The scale of adapters in one call, by its keyword."""

    def run(pipe):
        name = "joint_attention_kwargs" if hasattr(type(pipe), "joint_attention_kwargs") else "attention_kwargs"
        return {"cross_attention_kwargs" if prefix(pipe) == "unet" else name: {"scale": value}}

    return run


# ---- torch's own ways ----------------------------------------------------------------------------------------------------------------


def first_linear(module):
    return next(layer for name, layer in module.named_modules() if type(layer) is nn.Linear and name.endswith("to_q"))


def data_edit(pipe):
    for parameter in denoiser(pipe).parameters():
        parameter.data.mul_(1.02)


def copy_in_place(pipe):
    with torch.no_grad():
        for parameter in denoiser(pipe).parameters():
            parameter.copy_(parameter * 1.03)


def assign_data(pipe):
    for parameter in pipe.vae.parameters():
        parameter.data = parameter.data * 1.04


def other_values(module, factor):
    return {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in module.state_dict().items()}


def load_state(factor=1.05, **settings):
    return lambda pipe: denoiser(pipe).load_state_dict(other_values(denoiser(pipe), factor), **settings) and None


def hotswap(name, **settings):
    return lambda pipe: pipe.load_lora_weights(lora(pipe, **settings), adapter_name=name, hotswap=True)


def swap(pipe):
    weight = first_linear(denoiser(pipe)).weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 1.5, requires_grad=weight.requires_grad))


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrize(pipe):
    nn.utils.parametrize.register_parametrization(first_linear(denoiser(pipe)), "weight", Doubled())


def parametrized(pipe):
    return next(m for m in denoiser(pipe).modules() if nn.utils.parametrize.is_parametrized(m))


def unparametrize(leave):
    return lambda pipe: nn.utils.parametrize.remove_parametrizations(parametrized(pipe), "weight", leave_parametrized=leave) and None


def new_parameter(pipe):
    layer = first_linear(denoiser(pipe))
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5, requires_grad=False)


def cast(path, dtype):
    return on(path, "to", dtype)


def cast_all(pipe):
    pipe.to(torch.bfloat16)


def cast_dit(pipe):
    pipe.transformer.to(torch.bfloat16)


def cast_dit_back(pipe):
    pipe.transformer.to(torch.float32)


# ---- diffusers' own ------------------------------------------------------------------------------------------------------------------


def textual_inversion(pipe):
    width = pipe.text_encoder.get_input_embeddings().weight.shape[1]
    vector = torch.randn(2, width, generator=torch.Generator().manual_seed(3))
    pipe.load_textual_inversion({"<cat>": vector}, token="<cat>")
    return {"prompt": "a red <cat>"}


def no_textual_inversion(pipe):
    pipe.unload_textual_inversion()
    return {"prompt": "a red cat"}


def fuse_vae(pipe):
    pipe.vae.fuse_qkv_projections()


def plain_processor(pipe):
    pipe.unet.set_attn_processor(AttnProcessor())


def ip_adapter_state(unet, tokens=4):
    """One IP-Adapter, as a state dict."""
    random = torch.Generator().manual_seed(5)
    cross = unet.config.cross_attention_dim

    def draw(*size):
        return torch.randn(*size, generator=random) * 0.2

    projection = {
        "proj.weight": draw(cross * tokens, 32),
        "proj.bias": draw(cross * tokens),
        "norm.weight": draw(cross),
        "norm.bias": draw(cross),
    }
    layers, index = {}, 1
    for name in unet.attn_processors:
        if name.endswith("attn1.processor"):
            continue
        hidden = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        layers |= {f"{index}.to_k_ip.weight": draw(hidden, cross), f"{index}.to_v_ip.weight": draw(hidden, cross)}
        index += 2
    return {"image_proj": projection, "ip_adapter": layers}


def ip_adapter(pipe):
    pipe.load_ip_adapter(ip_adapter_state(pipe.unet), subfolder="", weight_name="", image_encoder_folder=None)
    return {"ip_adapter_image_embeds": [torch.linspace(-1, 1, 64).reshape(2, 1, 32)]}


def no_ip_adapter(pipe):
    pipe.unload_ip_adapter()
    return {"ip_adapter_image_embeds": None}


# ---- the table -----------------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Edit:
    """One change.

    Attributes:
        name: What it is called.
        edit: Takes the pipeline; may return keyword arguments that calls get from then on.
        setup: What comes before, before offload is enabled.
        within: Whether it makes sense in the middle of a call.
        families: The pipelines that it applies to.
    """

    name: str
    edit: Callable
    setup: Callable | None = None
    within: bool = True
    families: tuple[str, ...] = ("flux", "wan", "sd")


FUSED = chain(load(), call("fuse_lora"))
HOTSWAP = chain(call("enable_lora_hotswap", target_rank=8), load())


EDITS = (
    Edit("load", load()),
    Edit("load a folder", load_folder),
    Edit("load two", load_two),
    Edit("load with the text encoder's", load(encoder=True), families=("flux", "sd"), within=False),
    Edit("load a second", load("two", seed=2, rank=8), load()),
    Edit("weights", call("set_adapters", ["one", "two"], [0.2, 1.4]), load_two),
    Edit("choose one", call("set_adapters", "two"), load_two),
    Edit("scale in a call", scale(0.4), load(), within=False),
    Edit("disable", call("disable_lora"), load()),
    Edit("enable", call("enable_lora"), chain(load(), call("disable_lora"))),
    Edit("fuse", call("fuse_lora"), load()),
    Edit("fuse safely", call("fuse_lora", safe_fusing=True), load()),
    Edit("fuse at a scale", call("fuse_lora", lora_scale=0.3), load()),
    Edit("fuse in half precision", call("fuse_lora"), chain(cast_all, load())),
    Edit("fuse one of two", call("fuse_lora", adapter_names=["two"]), load_two),
    Edit("load and fuse", FUSED),
    Edit("load, fuse and unload", chain(FUSED, call("unload_lora_weights"))),
    Edit("unfuse", call("unfuse_lora"), FUSED),
    Edit("unload", call("unload_lora_weights"), load(encoder=True), families=("flux", "sd")),
    Edit("unload the denoiser's", call("unload_lora_weights"), load()),
    Edit("unload what is fused", call("unload_lora_weights"), FUSED),
    Edit("delete one", call("delete_adapters", "one"), load_two),
    Edit("delete all", call("delete_adapters", ["one", "two"]), load_two),
    Edit("swap in place", hotswap("one", seed=9), load()),
    Edit(
        "swap in place of another rank",
        hotswap("one", seed=9, rank=8),
        HOTSWAP,
    ),
    Edit("textual inversion", textual_inversion, within=False, families=("sd",)),
    Edit("no textual inversion", no_textual_inversion, textual_inversion, within=False, families=("sd",)),
    Edit("fuse projections", on("denoiser", "fuse_qkv_projections")),
    Edit("unfuse projections", on("denoiser", "unfuse_qkv_projections"), on("denoiser", "fuse_qkv_projections")),
    Edit("fuse the VAE's projections", on("vae", "fuse_qkv_projections"), families=("flux", "sd")),
    Edit("unfuse the VAE's projections", on("vae", "unfuse_qkv_projections"), on("vae", "fuse_qkv_projections"), families=("flux", "sd")),
    Edit("cast the VAE", cast("vae", torch.bfloat16), families=("wan",)),
    Edit("cast the VAE back", cast("vae", torch.float32), cast("vae", torch.bfloat16), families=("wan",)),
    Edit("cast the DiT", cast_dit, within=False, families=("wan",)),
    Edit("cast all", cast_all, within=False),
    Edit("cast all adapted", cast_all, load(), within=False),
    Edit("IP-Adapter", ip_adapter, within=False, families=("sd",)),
    Edit("no IP-Adapter", no_ip_adapter, ip_adapter, within=False, families=("sd",)),
    Edit("IP-Adapter's scale", call("set_ip_adapter_scale", 0.3), ip_adapter, families=("sd",)),
    Edit("FreeU", call("enable_freeu", s1=0.9, s2=0.2, b1=1.5, b2=1.6), families=("sd",)),
    Edit("attention processor", plain_processor, families=("sd",)),
    Edit("through .data", data_edit),
    Edit("in place", copy_in_place),
    Edit("assigned .data", assign_data),
    Edit("a new parameter", new_parameter),
    Edit("swapped", swap),
    Edit("state dict", load_state()),
    Edit("state dict, assigned", load_state(assign=True)),
    Edit("parametrised", parametrize),
    Edit("no parametrisation", unparametrize(leave=True), parametrize),
    Edit("parametrisation undone", unparametrize(leave=False), parametrize),
)


# ---- lives ---------------------------------------------------------------------------------------------------------------------------

#: Edits one after the other on one pipeline, a call after each: what an adapter, a weight, a Stable Diffusion goes through.
LIVES = {
    "adapters": (
        ("flux", "wan", "sd"),
        (
            load(),
            scale(0.4),
            load("two", seed=2, rank=8),
            call("set_adapters", ["one", "two"], [0.2, 1.4]),
            call("disable_lora"),
            call("enable_lora"),
            call("fuse_lora"),
            call("unfuse_lora"),
            call("delete_adapters", "one"),
            hotswap("two", seed=9, rank=8),
            call("unload_lora_weights"),
            load_folder,
            call("fuse_lora", safe_fusing=True),
            call("unload_lora_weights"),
        ),
    ),
    "weights": (
        ("flux", "wan", "sd"),
        (
            data_edit,
            copy_in_place,
            assign_data,
            new_parameter,
            swap,
            load_state(),
            load_state(assign=True),
            parametrize,
            unparametrize(leave=False),
            on("denoiser", "fuse_qkv_projections"),
            on("denoiser", "unfuse_qkv_projections"),
            cast_all,
        ),
    ),
    "stable diffusion": (
        ("sd",),
        (
            textual_inversion,
            load(encoder=True),
            call("unload_lora_weights"),
            no_textual_inversion,
            ip_adapter,
            call("set_ip_adapter_scale", 0.3),
            no_ip_adapter,
            call("enable_freeu", s1=0.9, s2=0.2, b1=1.5, b2=1.6),
            fuse_vae,
            on("vae", "unfuse_qkv_projections"),
            plain_processor,
        ),
    ),
    "casts": (
        ("wan",),
        (
            cast("vae", torch.bfloat16),
            cast_dit,
            cast("vae", torch.float32),
            cast_dit_back,
        ),
    ),
}

#: Steps of a life that mean something only at the start of a call.
NOT_WITHIN = (cast_all, cast_dit, cast_dit_back, textual_inversion, no_textual_inversion, ip_adapter, no_ip_adapter)
