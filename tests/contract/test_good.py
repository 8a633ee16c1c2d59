"""Right pipelines of every form pass the contract, so that what fails a wrong one is its fault."""

import pytest
import torch
from contract_tiny import WIDTH, Adapting, Base, Denoiser, HandWritten, Tiny, case_of
from torch import nn

from omni_offload import OmniOffloadMixin
from omni_offload.testing import Outcome, check_pipeline


class Together(Tiny):
    """Two components move together."""

    _co_resident_modules = [("transformer", "vae")]


class Resident(Tiny):
    """One component stays on the device."""

    _vae_modules = []
    _resident_modules = ["vae"]


class Experts(Tiny):
    """Two DiTs, of which the second is None."""

    _dit_modules = ["transformer", "transformer_2"]
    transformer_2 = None


class Nested(Tiny):
    """Its components lie in an object of their own."""

    _dit_modules = ["models.transformer"]
    _encoder_modules = ["models.text_encoder"]
    _vae_modules = ["models.vae"]
    _offload_plan = None
    _offload_entry_points = {"models.vae": ("encode", "decode"), "": ("encode_prompt",)}

    def __init__(self):
        super().__init__()
        self.models = Parts()
        for name in ("text_encoder", "transformer", "vae"):
            setattr(self.models, name, self.__dict__.pop(name))

    text_encoder = property(lambda self: self.models.text_encoder, lambda self, value: vars(self).update(text_encoder=value))
    transformer = property(lambda self: self.models.transformer, lambda self, value: vars(self).update(transformer=value))
    vae = property(lambda self: self.models.vae, lambda self, value: vars(self).update(vae=value))


class Parts:
    """Holds components."""


class Module(OmniOffloadMixin, nn.Module):
    """A pipeline that is a module itself, with a call named forward."""

    _dit_modules = ["transformer"]
    _encoder_modules = []
    _vae_modules = ["vae"]
    _offload_entry_points = {"vae": ("decode",)}

    def __init__(self):
        super().__init__()
        parts = Base()
        self.transformer, self.vae = parts.transformer, parts.vae

    @property
    def _execution_device(self):
        backend = self.offload_backend
        return backend.device if backend is not None else self.transformer.blocks[0].weight.device

    def forward(self, ids, latents):
        del ids
        latents = latents.to(self._execution_device, self.transformer.blocks[0].weight.dtype)
        return self.vae.decode(self.transformer(latents, torch.zeros_like(latents)))


class Forms(Tiny):
    """Its weights are strided, sliced, empty, of several types, and share memory."""

    def __init__(self):
        super().__init__()
        self.transformer = Odd().eval()


class Odd(Denoiser):
    """Holds tensors of every form."""

    def __init__(self):
        super().__init__()
        flat = torch.randn(3 * WIDTH * WIDTH)
        for index, block in enumerate(self.blocks):
            block.weight = nn.Parameter(flat[index * WIDTH * WIDTH : (index + 1) * WIDTH * WIDTH].view(WIDTH, WIDTH).T)
        self.register_buffer("halves", torch.randn(5, 7).half().T)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("one", torch.tensor(0.5))
        self.register_buffer("wide", torch.randn(4, 1).expand(4, 6), persistent=False)
        self.register_buffer("whole", torch.tensor(3))

    def forward(self, x, text):
        return super().forward(x, text) * self.one + self.wide[2, 3] * 0.01 + self.halves.float().mean() + self.flags.sum() * 0.1


RIGHT = {Tiny: 1, Adapting: 0, Together: 1, Resident: 1, Experts: 1, Nested: 1, Module: 2, Forms: 1, HandWritten: 6}


@pytest.mark.parametrize("cls", RIGHT, ids=lambda cls: cls.__name__)
def test_right_pipeline(cls):
    """It fails no check, and so many are left out."""
    report = check_pipeline(case_of(cls))
    report.raise_for_failures()
    assert len(report.named(Outcome.NOT_RUN)) == RIGHT[cls], str(report)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cls", [Tiny, HandWritten], ids=lambda cls: cls.__name__)
def test_right_pipeline_exhaustively(cls):
    """It fails no check where every line is interrupted and every combination tried."""
    check_pipeline(case_of(cls), exhaustive=True).raise_for_failures()
