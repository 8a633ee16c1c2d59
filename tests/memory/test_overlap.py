"""Copies and computation at once, on real threads: a model of many times the device's memory, streamed, to the last bit."""

import time

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.testing import sim

MIB = 1 << 20


class Denoise(OmniOffloadMixin):
    """A Flux transformer, some steps of it."""

    _dit_modules = ["transformer"]
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("transformer_blocks", "single_transformer_blocks")})

    def __init__(self, *, heads, layers, single_layers):
        with torch.device("meta"):
            model = FluxTransformer2DModel(
                patch_size=1,
                in_channels=16,
                num_layers=layers,
                num_single_layers=single_layers,
                attention_head_dim=64,
                num_attention_heads=heads,
                joint_attention_dim=64,
                pooled_projection_dim=64,
                guidance_embeds=False,
                axes_dims_rope=(16, 24, 24),
            )
        self.transformer = model.to_empty(device="cpu").eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.transformer.named_parameters():
            scale = 0.5 / parameter.shape[-1] ** 0.5
            nn.init.uniform_(parameter, -scale, scale, generator=generator)
            if "norm_" in name:
                parameter.add_(1)

    def __call__(self, steps):
        generator = torch.Generator().manual_seed(1)
        x, text, pooled = (torch.randn(*size, generator=generator) for size in ((1, 16, 16), (1, 8, 64), (1, 64)))
        ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
        for step in range(steps):
            noise = self.transformer(
                hidden_states=x,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=torch.tensor([1 - step / steps]),
                img_ids=ids,
                txt_ids=torch.zeros(8, 3),
                return_dict=False,
            )[0]
            x = x - noise.cpu() / steps
        return x


@pytest.fixture
def threads(device):
    """Threads mode, with the checks that it has, and a memory of its own."""
    sim.configure(mode="threads", races="record")
    yield device
    sim.configure(capacity=0, h2d_gbps=0.0)


def _seconds(spans):
    """Seconds in which something was copied to the device, something was computed, and both."""
    edges = []
    for span in spans:
        kind = 0 if span.what == "H2D copy" else 1
        edges += [(span.start, kind, 1), (span.end, kind, -1)]
    running, last, sums = [0, 0], 0.0, [0.0, 0.0, 0.0]
    for at, kind, change in sorted(edges):
        for index, on in enumerate((running[0] > 0, running[1] > 0, running[0] > 0 and running[1] > 0)):
            sums[index] += (at - last) * on
        running[kind] += change
        last = at
    return sums


@pytest.mark.parametrize(
    ("sizes", "capacity", "h2d_gbps"),
    [
        pytest.param({"heads": 2, "layers": 6, "single_layers": 6}, 14 * MIB, 0.5, id="20 MiB"),
        pytest.param(
            {"heads": 8, "layers": 28, "single_layers": 6},
            300 * MIB,
            2.0,
            id="1.1 GiB",
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)],
        ),
    ],
)
def test_a_large_model_streams(threads, sizes, capacity, h2d_gbps, record_property):
    """Bit-identical, within the device's memory, without a race, and copies run while blocks do; how long it took is only noted."""
    pipe = Denoise(**sizes)
    weights = sum(parameter.nbytes for parameter in pipe.transformer.parameters())
    blocks = [sum(p.nbytes for p in block.parameters()) for block in pipe.transformer.transformer_blocks]
    assert weights > capacity
    with torch.no_grad():
        start = time.perf_counter()
        want = pipe(steps=3)
        on_host = time.perf_counter() - start
    sim.configure(capacity=sim.allocated() + capacity, h2d_gbps=h2d_gbps)
    sim.reset_peak()
    before = sim.allocated()
    with pipe.enable_omni_offload("layer", device=threads, device_memory=int(0.9 * capacity)) as backend, torch.no_grad():
        pipe(steps=1)
        copied = sim.h2d_bytes()
        with sim.trace() as trace:
            start = time.perf_counter()
            got = pipe(steps=3)
            wall = time.perf_counter() - start
        copied = sim.h2d_bytes() - copied
        report = backend.report()
    assert torch.equal(got, want)
    assert sim.races() == []
    assert sim.peak() - before <= capacity
    assert report.peak_device_bytes <= int(0.9 * capacity)
    copying, computing, both = _seconds(trace)
    assert both > 0
    told = {
        "weights MiB": weights / MIB,
        "largest block MiB": max(blocks) / MIB,
        "peak MiB": (sim.peak() - before) / MIB,
        "copied MiB": copied / MIB,
        "wall s": wall,
        "copying s": copying,
        "computing s": computing,
        "both s": both,
        "host s": on_host,
    }
    for name, value in told.items():
        record_property(name, round(value, 3))
    print(told)  # noqa: T201  (shown with -s)
