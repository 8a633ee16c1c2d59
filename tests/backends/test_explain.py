"""A weight that is used outside its activation ends in an error that names component and weight."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from omni_offload import OffloadStateError
from omni_offload.backends.explain import _operands, explain


def a_function(pipe, x):
    return functional.linear(x, pipe.vae.enc.weight)


def a_function_of_a_view(pipe, x):
    part = pipe.vae.enc.weight.t()
    return x @ part


def a_function_of_the_last_rows(pipe, x):
    part = pipe.vae.enc.weight[32:]
    return functional.linear(x, part)


def a_function_in_a_list(pipe, x):
    return functional.linear(
        x,
        pipe.transformer.blocks[1].weight,
    )


def in_a_condition(pipe, x):
    if (x + pipe.transformer.pos_embed).sum() > 0:
        return x
    return -x


def submodule(pipe, x):
    return pipe.transformer.blocks[2](x)


def captured(pipe, x):
    return pipe.embed(x)


CASES = {
    a_function: ("vae", "vae.enc.weight"),
    a_function_of_a_view: ("vae", "vae.enc.weight"),
    a_function_of_the_last_rows: ("vae", "vae.enc.weight"),
    a_function_in_a_list: ("transformer", "transformer.blocks.1.weight"),
    in_a_condition: ("transformer", "transformer.pos_embed"),
    submodule: ("transformer", "transformer.blocks.2"),
    captured: ("transformer", "transformer.pos_embed"),
}


@pytest.mark.parametrize("use", CASES, ids=lambda use: use.__name__)
def test_the_error_names_component_and_weight(pipe, x, use):
    """Torch's error is the cause of one that says which weight was on the host, and what to declare."""
    component, weight = CASES[use]
    pipe.embed = pipe.transformer.embed
    pipe.on_step = lambda _, y: use(pipe, y)
    pipe.enable_omni_offload(device="sim")
    with pytest.raises(OffloadStateError) as info:
        pipe(x)
    assert f"component {component!r}: {weight}" in str(info.value)
    assert "_offload_entry_points" in str(info.value)
    assert "same device" in str(info.value.__cause__)
    info.value.__cause__.__traceback__ = None
    del info
    pipe.disable_omni_offload()


def test_a_component_on_the_device_is_not_blamed(pipe, x):
    """A mismatch inside a component that was active, and one inside on_device, stay torch's errors."""

    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(64), requires_grad=False)
            self.tables = [torch.ones(64)]

        def forward(self, y, cond=None):
            return y * self.w + self.tables[0]

    pipe.transformer = Lists()
    pipe.enable_omni_offload(device="sim")
    with pytest.raises(RuntimeError, match="same device") as info:
        pipe(x)
    assert not isinstance(info.value, OffloadStateError)
    del info
    pipe.disable_omni_offload()


def test_other_errors_are_unchanged(pipe, x):
    """Errors that are no device mismatch, or have nothing to do with a weight, pass."""
    pipe.enable_omni_offload(device="sim")
    pipe.on_step = lambda _, y: y @ y
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|mat1"):
        pipe(x)
    host = torch.ones(64)
    pipe.on_step = lambda _, y: functional.layer_norm(y, (64,), host)
    with pytest.raises(RuntimeError, match="same device") as info:
        pipe(x)
    assert not isinstance(info.value, OffloadStateError)
    del info
    pipe.disable_omni_offload()


def test_explain_looks_only_at_what_can_be_explained():
    """No error of ours, no other type, no traceback: nothing is claimed."""
    assert explain(OffloadStateError("same device"), []) is None
    assert explain(ValueError("same device"), []) is None
    assert explain(RuntimeError("something"), []) is None
    assert explain(RuntimeError("same device"), []) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("net.part.weight", True),
        ("holder['net'].weight", True),
        ("nets[0].weight", True),
        ("nets[7].weight", False),
        ("modules['a'].weight", True),
        ("number[0]", False),
        ("(lambda: 1)().x", False),
        ("nets[index].weight", False),
        ("not = python", False),
    ],
)
def test_operands_are_looked_up_without_calling(tmp_path, text, found):
    """Dotted names and constant subscripts are followed; nothing is called; what cannot be read yields nothing."""
    import sys

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(1, 1)
            self.plain = 3

    source = tmp_path / "source.py"
    source.write_text(text)
    net = Net()
    net.weight = nn.Parameter(torch.ones(1))
    holder, nets, modules, number, index = {"net": net}, [net], nn.ModuleDict({"a": net.part}), 5, 0
    frame = sys._getframe()
    frame = type("Frame", (), {"f_code": type("C", (), {"co_filename": str(source)}), "f_locals": locals(), "f_globals": {}})
    values = list(_operands(frame, (1, 1, 0, len(text))))
    weights = [value for value in values if isinstance(value, torch.Tensor)]
    assert bool(weights) == found
    assert list(_operands(frame, (None, 1, 0, 1))) == []
    assert (number, index, len(holder), len(nets), len(modules)) == (5, 0, 1, 1, 1)
