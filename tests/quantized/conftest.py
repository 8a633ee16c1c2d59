"""A tiny Flux whose DiT is quantised, offloaded or resident; after each test nothing is left on the device, and no race."""

import warnings

import pytest
import torch
from torch import nn

from pipelines.flux.cases import FLUX


@pytest.fixture(autouse=True)
def leaves_nothing(nothing_left):
    """Every test here ends with an empty device, no pinned byte and no race."""


def to_torchao(config):
    """Return a function that quantises a model by one of torchao's configurations."""

    def quantise(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torchao says when it is imported
            import torchao.quantization as torchao
        torchao.quantize_(model, getattr(torchao, config)())

    return quantise


def to_gguf(kind):
    """Return a function that puts GGUF layers with quantised blocks in the place of linear layers."""

    def quantise(model):
        import gguf
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

        quant_type = gguf.GGMLQuantizationType[kind]
        for name, layer in list(model.named_modules()):
            if type(layer) is nn.Linear and layer.in_features % 32 == 0:
                packed = torch.from_numpy(gguf.quantize(layer.weight.detach().numpy(), quant_type))
                new = GGUFLinear(layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.float32)
                new.weight, new.bias = GGUFParameter(packed, quant_type=quant_type), layer.bias
                model.set_submodule(name, new)
        model.requires_grad_(False)

    return quantise


QUANTISATIONS = {
    "int8 weights": to_torchao("Int8WeightOnlyConfig"),
    "int8 weights and activations": to_torchao("Int8DynamicActivationInt8WeightConfig"),
    "float8 weights": to_torchao("Float8WeightOnlyConfig"),
    "unpacked int weights": to_torchao("IntxWeightOnlyConfig"),
    "Q8_0": to_gguf("Q8_0"),
    "Q4_0": to_gguf("Q4_0"),
}
FAST = ("int8 weights", "Q8_0")


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.exhaustive) for name in QUANTISATIONS])
def make(request):
    """Return a function that makes a pipeline with a quantised DiT, the same one every time."""

    def make_pipeline():
        pipe = FLUX.make_pipeline()
        QUANTISATIONS[request.param](pipe.transformer)
        return pipe

    return make_pipeline


@pytest.fixture(scope="session")
def run():
    """Return a function that runs one call and returns what it made, on the CPU."""

    def call(pipe, **extra):
        with torch.no_grad():
            return [tensor.detach().cpu() for tensor in FLUX.outputs(pipe(**FLUX.make_inputs(pipe), **extra))]

    return call


@pytest.fixture(scope="session")
def resident(run):
    """Return a function that runs a pipeline as a whole on the device, and brings it back."""

    def call(pipe, device):
        pipe.to(device)
        try:
            return run(pipe)
        finally:
            pipe.to("cpu")

    return call


@pytest.fixture(scope="session")
def to_int8():
    """Return a function that quantises a model."""
    return QUANTISATIONS["int8 weights"]
