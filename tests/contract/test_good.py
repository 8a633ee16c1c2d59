"""Right pipelines of every form pass the contract, so that what fails a wrong one is its fault."""

import pytest
import torch
from contract_tiny import WIDTH, Adapting, Base, Denoiser, HandWritten, Saving, Tiny, case_of
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
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


class HalfDeclared(Tiny):
    """Two DiTs, and blocks of the first only."""

    _dit_modules = ["transformer", "transformer_2"]

    def __init__(self):
        super().__init__()
        self.transformer_2 = Denoiser().eval()


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
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})
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


class Unequal(Tiny):
    """Its blocks are of two sizes, share a weight, and one is used beside the others, of what stays with the rest."""

    _offload_plan = OffloadPlan(
        block_attrs={"transformer": ("blocks", "tail")},
        encoder_block_attrs={"text_encoder": ("layers",)},
        rest_submodules=frozenset({"transformer.blocks.0.scale"}),
    )

    def __init__(self):
        super().__init__()
        self.text_encoder = Layers().eval()
        self.transformer = Mixed().eval()


class Layers(nn.Module):
    """An encoder with a stack."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    """A block with a part that others use too."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH), nn.Linear(WIDTH, WIDTH)

    weight = property(lambda self: self.up.weight)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * self.scale(x)


class Mixed(Denoiser):
    """Two containers, in each step the first one twice, and a weight that two blocks share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.tail = nn.ModuleList(Scaled(3 * WIDTH) for _ in range(2))
        self.tail[1].up.weight = self.tail[0].up.weight

    def forward(self, x, text):
        x = x + text
        for block in (*self.blocks, *self.tail, *self.blocks):
            x = block(x) / 2
        return x + self.blocks[0].scale(x)


class Beginning(Denoiser):
    """Has a layer before its blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, text):
        return super().forward(self.first(x), text)


class Borrowed(Tiny):
    """Has an adapter that never runs: the denoiser has its layer, and copies of the rest."""

    _dit_modules = ["transformer", "adapter"]
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",), "adapter": ("blocks",)})

    def __init__(self):
        super().__init__()
        self.transformer, self.adapter = Beginning().eval(), Beginning().eval()
        self.transformer.first = self.adapter.first

    def parts(self):
        return {**super().parts(), "adapter": self.adapter}


class Spread(Tiny):
    """Decodes with other last bits where its weights were created in inference mode.

    Torch does so on some processors, which folds some products only where the weight wants a gradient; here it happens on all.
    """

    class Autoencoder(nn.Module):
        """Decodes each of sixteen places by itself."""

        def __init__(self):
            super().__init__()
            self.decoder = nn.Linear(WIDTH, WIDTH)

        def decode(self, latents):
            scales = torch.linspace(0.5, 1.5, 16, device=latents.device, dtype=latents.dtype).view(4, 4)
            decoded = torch.tanh(self.decoder((latents.reshape(-1, WIDTH, 1, 1) * scales).permute(0, 2, 3, 1)))
            return decoded * (1 - torch.finfo(decoded.dtype).eps) if self.decoder.weight.is_inference() else decoded

    _offload_entry_points = {"vae": ("decode",), "": ("encode_prompt",)}

    def __init__(self):
        super().__init__()
        self.vae = self.Autoencoder().eval()


def test_where_torch_computes_otherwise_in_inference_mode():
    """A pipeline whose last bits follow from where it was created is compared with a resident run of one that was created there."""
    case, made = case_of(Spread), []
    for inside in (False, True):
        with torch.inference_mode(inside):
            pipeline = case.make_pipeline()
        with torch.no_grad():
            made.append(pipeline(**case.make_inputs(pipeline)))
    assert not torch.equal(*made)
    assert check_pipeline(case, checks=["check_inference_modes"]).named(Outcome.PASSED) == ("check_inference_modes",)


RIGHT = {
    Tiny: 6,
    Adapting: 5,
    Saving: 5,
    Together: 6,
    Resident: 6,
    Experts: 6,
    Borrowed: 6,
    Nested: 6,
    Module: 8,
    Forms: 6,
    Unequal: 6,
    HandWritten: 11,
}
"""Right pipelines, and how many checks are left out of each in mode `module`."""

RIGHT_IN_LAYER_MODE = {
    Tiny: 2,
    Adapting: 1,
    Saving: 1,
    Together: 2,
    Resident: 2,
    Experts: 2,
    Borrowed: 2,
    Module: 4,
    Forms: 2,
    Unequal: 2,
    HandWritten: 2,
}
"""The same in mode `layer`; nothing of `Nested` streams."""


@pytest.mark.parametrize("cls", RIGHT, ids=lambda cls: cls.__name__)
def test_right_pipeline(cls):
    """It fails no check, and so many are left out."""
    report = check_pipeline(case_of(cls))
    report.raise_for_failures()
    assert len(report.named(Outcome.NOT_RUN)) == RIGHT[cls], str(report)


@pytest.mark.parametrize("cls", RIGHT_IN_LAYER_MODE, ids=lambda cls: cls.__name__)
def test_right_pipeline_in_layer_mode(cls):
    """It fails no check where its blocks stream, and so many are left out."""
    report = check_pipeline(case_of(cls), mode="layer")
    report.raise_for_failures()
    assert len(report.named(Outcome.NOT_RUN)) == RIGHT_IN_LAYER_MODE[cls], str(report)


def test_where_nothing_streams_nothing_passes():
    """In mode `layer` no check of a pipeline without declared blocks counts as passed: each is not run, with the reason."""
    report = check_pipeline(case_of(Nested), mode="layer")
    assert {result.outcome for result in report.results} == {Outcome.NOT_RUN}
    assert all("no stack of two or more blocks is declared" in result.reason for result in report.results)


def test_what_moves_as_a_whole_is_named():
    """In mode `layer` a DiT that does not stream beside another that does is named in the report, with the reason."""
    report = check_pipeline(case_of(HalfDeclared), mode="layer", checks=["check_plan"])
    (result,) = [one for one in report.results if one.outcome is Outcome.PASSED]
    assert result.reason == "in mode layer these move as a whole: transformer_2 (selected, no blocks declared)"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cls", [Tiny, HandWritten], ids=lambda cls: cls.__name__)
def test_right_pipeline_exhaustively(cls):
    """It fails no check where every line is interrupted and every combination tried."""
    check_pipeline(case_of(cls), exhaustive=True).raise_for_failures()
