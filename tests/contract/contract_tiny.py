"""Tiny plain pipelines, without any library: one that inherits the pair of methods, one that wrote its own."""

import functools
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from omni_offload import HookRegistry, ModelHook, ModuleResidency, OffloadPlan, OmniOffloadMixin, run_cleanup_steps
from omni_offload.errors import OffloadStateError
from omni_offload.testing import PipelineCase

WIDTH = 96


class Encoder(nn.Module):
    """Token ids to one vector each; its output layer is tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, ids):
        return self.head(self.embed(ids) * self.scale)


class Denoiser(nn.Module):
    """A stack of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, text):
        for block in self.blocks:
            x = x + torch.tanh(block(x + text))
        return x


class Autoencoder(nn.Module):
    """Two halves, each with a method of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def encode(self, image):
        return torch.tanh(self.encoder(image))

    def decode(self, latents):
        return torch.tanh(self.decoder(latents))

    def forward(self, image):
        return self.decode(self.encode(image))

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, Path(folder) / "model.safetensors")


class Declared:
    """What a pipeline of these parts declares."""

    _dit_modules = ["transformer"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})
    _offload_entry_points = {"vae": ("encode", "decode"), "": ("encode_prompt",)}


class Base:
    """What the pipeline does, without offload."""

    def __init__(self):
        self.text_encoder = Encoder().eval()
        self.transformer = Denoiser().eval()
        self.vae = Autoencoder().eval()

    def parts(self):
        return {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae}

    def to(self, *args, **kwargs):
        for part in self.parts().values():
            part.to(*args, **kwargs)
        return self

    @property
    def _execution_device(self):
        return self.transformer.blocks[0].weight.device

    def encode_prompt(self, ids):
        return self.text_encoder(ids.to(self._execution_device))

    def denoise(self, latents, text, callback=None, steps=3):
        for step in range(steps):
            latents = latents - 0.2 * self.transformer(latents, text)
            if callback is not None:
                callback(self, step)
        return latents

    def __call__(self, ids, latents, callback_on_step_end=None):
        text = self.encode_prompt(ids)
        latents = self.denoise(latents.to(self._execution_device, text.dtype), text, callback_on_step_end)
        return self.vae.decode(latents)


class Tiny(Declared, OmniOffloadMixin, Base):
    """Inherits everything."""


class Saving(Tiny):
    """Is saved in a folder, and loaded from there, by calls named as diffusers' are."""

    def save_pretrained(self, folder):
        for name, part in self.parts().items():
            torch.save(part.state_dict(), Path(folder) / f"{name}.pt")

    @classmethod
    def from_pretrained(cls, folder):
        pipeline = cls()
        for name, part in pipeline.parts().items():
            part.load_state_dict(torch.load(Path(folder) / f"{name}.pt"))
        return pipeline


class LowRank(nn.Module):
    """A layer and adapters beside it, by name: two factors and a weight each."""

    def __init__(self, base):
        super().__init__()
        self.base, self.adapters, self.fused = base, nn.ModuleDict(), None
        self.weights = {}

    weight = property(lambda self: self.base.weight)
    in_features = property(lambda self: self.base.in_features)
    out_features = property(lambda self: self.base.out_features)

    def add(self, name, a, b):
        place = self.base.weight.device
        self.adapters[name] = nn.ParameterDict({"a": a.to(place), "b": b.to(place)}).requires_grad_(requires_grad=False)
        self.weights[name] = 1.0

    def fuse(self):
        self.fused = self.base.weight.detach().clone()
        for name, factors in self.adapters.items():
            self.base.weight.data += self.weights[name] * factors["b"] @ factors["a"]

    def unfuse(self):
        self.base.weight.data.copy_(self.fused)
        self.fused = None

    def forward(self, x):
        y = self.base(x)
        for name, factors in self.adapters.items() if self.fused is None else ():
            y = y + self.weights[name] * (x @ factors["a"].T @ factors["b"].T)
        return y


class Adapting(Tiny):
    """Takes adapters for its DiT, by calls named as diffusers' are."""

    transformer_name = "transformer"

    def layers(self):
        return [module for module in self.transformer.modules() if isinstance(module, LowRank)]

    def load_lora_weights(self, state, adapter_name):
        for key in [key for key in state if key.endswith(".lora_A.weight")]:
            holder, _, name = key.removeprefix("transformer.").removesuffix(".lora_A.weight").rpartition(".")
            parent = self.transformer.get_submodule(holder)
            if not isinstance(parent._modules[name], LowRank):
                parent._modules[name] = LowRank(parent._modules[name])
            parent._modules[name].add(adapter_name, state[key], state[key.replace("lora_A", "lora_B")])

    def set_adapters(self, name, weight):
        for layer in self.layers():
            layer.weights[name] = weight

    def fuse_lora(self):
        for layer in self.layers():
            layer.fuse()

    def unfuse_lora(self):
        for layer in self.layers():
            layer.unfuse()

    def delete_adapters(self, name):
        for layer in self.layers():
            del layer.adapters[name]


class Hook(ModelHook):
    """Runs a component's methods with it, and the inputs, on the device."""

    def __init__(self, pipeline, path):
        self.pipeline, self.path, self.open = pipeline, path, []

    def pre_forward(self, module, method, args, kwargs):
        self.open.append(ExitStack())
        self.pipeline.refuse_autograd(module)
        self.open[-1].enter_context(self.pipeline.stage(self.path))
        return self.pipeline.align(self.path, args), self.pipeline.align(self.path, kwargs)

    def post_forward(self, module, method, output):
        self.open.pop().close()
        return output

    def on_error(self, module, method, error):
        self.open.pop().close()


class HandWritten(Declared, OmniOffloadMixin, Base):
    """Wrote its own pair, over `ModuleResidency`; small methods, so that wrong pipelines override one of them."""

    residencies = None
    rotating = frozenset()
    device = None
    originals = None
    calls = 0

    def enable_omni_model_cpu_offload(self, *, device, pin_memory, use_hsdp, offload_components=None):
        kinds = {"text_encoder": "text_encoder", "transformer": "dit", "vae": "vae"}
        self.rotating = {path for path, kind in kinds.items() if offload_components is None or kind in offload_components}
        self.device = device
        self.originals = self.parts()
        self.residencies = {path: ModuleResidency(part, device, pin_memory=pin_memory, name=path) for path, part in self.parts().items()}
        try:
            self.take_over()
        except BaseException:
            self.give_up(undo=True)
            raise
        for residency in self.residencies.values():
            residency.commit()

    def disable_omni_model_cpu_offload(self):
        self.give_up(undo=False)

    def take_over(self):
        for path, residency in self.residencies.items():
            residency.prepare(keep_origin=True)
            if path not in self.rotating:
                residency.load()
        for path, part in self.parts().items():
            methods = ("forward", *self._offload_entry_points.get(path, ()))
            HookRegistry.get_or_create(part).register_hook("hand", Hook(self, path), methods)

    def give_up(self, *, undo):
        residencies = self.residencies or {}
        steps = [("unhook", functools.partial(self.unhook, path)) for path in residencies]
        for path, residency in residencies.items():
            back = not undo and path not in self.rotating
            steps.append(("restore", functools.partial(residency.restore, to_origin=undo, copy_back=back)))
        error = run_cleanup_steps(steps)
        if error is not None:
            raise error
        self.forget()

    def forget(self):
        for name in ("residencies", "rotating", "device", "originals", "calls"):
            self.__dict__.pop(name, None)

    def unhook(self, path):
        HookRegistry.get_or_create(self.originals[path]).remove_hook("hand")

    def refuse_autograd(self, module):
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            raise OffloadStateError(f"{type(module).__name__} was called in grad mode")

    def align(self, path, value):
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        if isinstance(value, dict):
            return {key: self.align(path, item) for key, item in value.items()}
        return type(value)(self.align(path, item) for item in value) if isinstance(value, (tuple, list)) else value

    def evict(self, but=None):
        for path, residency in self.residencies.items():
            if path in self.rotating and path != but:
                residency.offload()

    def enter(self, path):
        self.evict(but=path)
        self.residencies[path].load()

    def leave(self, path):
        if not self.calls:
            self.residencies[path].offload()

    @contextmanager
    def stage(self, path):
        if path not in self.rotating:
            yield
            return
        try:
            self.enter(path)
            yield
        finally:
            self.leave(path)

    @contextmanager
    def call(self):
        before = self.calls
        self.require_originals()
        try:
            self.calls = before + 1
            yield
        finally:
            try:
                self.end_call(before)
            finally:
                self.end_call(before)  # again: an interrupt cuts one of them short

    def end_call(self, before):
        self.calls = before
        if self.residencies is not None and not before:
            self.evict()

    def require_originals(self):
        if self.originals is not None and any(part is not self.originals[path] for path, part in self.parts().items()):
            raise OffloadStateError("a component was replaced; disable offload first")

    def __call__(self, ids, latents, callback_on_step_end=None):
        with self.call():
            return super().__call__(ids, latents, callback_on_step_end)


def inputs(_pipeline):
    """Return a call's arguments."""
    generator = torch.Generator().manual_seed(1)
    return {"ids": torch.arange(8).view(1, 8) * 5, "latents": torch.randn(1, 8, WIDTH, generator=generator)}


def case_of(make, **fields):
    """Return the case of a pipeline class, or of a function that makes one."""

    def make_pipeline():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return make()

    values = {"name": make.__name__, "make_pipeline": make_pipeline, "make_inputs": inputs, "outputs": lambda result: [result]}
    return PipelineCase(**{**values, **fields})
