"""The denoising loop of a Flux under every way to offload it, on one simulated device: seconds of a step, over device memory."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from shapes import weight_bytes

from omni_offload.testing import sim
from pipelines.flux.pipeline_flux import OmniFluxPipeline
from pipelines.tiny.components import autoencoder_kl
from pipelines.tiny.seeding import generator, seeded

__all__ = ["PEERS", "Comparison", "Flux", "Point", "compare"]

LINK_GBPS, REAL_BYTES = 25.0, 23.8e9
_SETTINGS: Mapping[str, Any] = {
    "mode": "virtual",
    "races": "record",
    "poison": False,
    "copy_latency": 10e-6,
    "launch": 5e-6,
    "memory_gbps": 0.0,
}
_STEPS = (2, 6)
#: Where between the least with three slots and everything our budgets lie; one more is the least with two.
SHARES = (0.0, 0.15, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def _group(**settings: Any) -> Callable[[Any, torch.device], None]:
    return lambda pipe, device: pipe.enable_group_offload(onload_device=device, **settings)


_BLOCKS: Mapping[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
_LEAVES: Mapping[str, Any] = {"offload_type": "leaf_level"}

#: The other ways to offload, by name.
PEERS: Mapping[str, Callable[[Any, torch.device], None]] = {
    "group, blocks, stream": _group(**_BLOCKS, use_stream=True),
    "group, blocks, stream, record_stream": _group(**_BLOCKS, use_stream=True, record_stream=True),
    "group, leaves, stream": _group(**_LEAVES, use_stream=True),
    "group, leaves, stream, record_stream": _group(**_LEAVES, use_stream=True, record_stream=True),
    "group, blocks": _group(**_BLOCKS),
    "group, 2 blocks": _group(**{**_BLOCKS, "num_blocks_per_group": 2}),
    "group, 4 blocks": _group(**{**_BLOCKS, "num_blocks_per_group": 4}),
    "sequential": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "model": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
}


@attrs.frozen(kw_only=True)
class Flux:
    """How large the pipeline is: many blocks of little arithmetic, in the proportions of the real one."""

    double: int = 4
    single: int = 8
    heads: int = 3

    def make(self, cls: type) -> Any:
        """Build a pipeline without encoders, every time with the same weights."""
        with seeded(0), torch.no_grad():
            transformer = FluxTransformer2DModel(
                patch_size=1,
                in_channels=64,
                num_layers=self.double,
                num_single_layers=self.single,
                attention_head_dim=64,
                num_attention_heads=self.heads,
                joint_attention_dim=64,
                pooled_projection_dim=32,
                guidance_embeds=True,
                axes_dims_rope=(16, 24, 24),
            )
            vae = autoencoder_kl(shift_factor=0.1, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)
        encoders = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        pipe = cls(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=vae.eval().requires_grad_(requires_grad=False),
            transformer=transformer.eval().requires_grad_(requires_grad=False),
            **encoders,
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe


@attrs.frozen(kw_only=True)
class Point:
    """One way to offload.

    Attributes:
        name: The way.
        peak: Most device bytes in use at once: activations too, and what was freed while a recorded stream may still read it.
        step: Seconds of one step after the first two, virtual.
        call: Seconds from the beginning of a call of six steps, the third after enabling, until its output is on the host.
        equal: Whether the output is a resident run's, bit for bit.
        races: Pairs of operations that nothing ordered.
        slots: Ours: the slots that it was given; else 0.
    """

    name: str
    peak: int
    step: float
    call: float
    equal: bool
    races: int
    slots: int = 0


@attrs.frozen(kw_only=True)
class Comparison:
    """All ways to offload one pipeline.

    Attributes:
        ratio: Seconds of all blocks' copies over those of all computation.
        weights: Bytes of the denoiser's weights.
        rest: Of these, what is not in a block.
        slot: Bytes of the largest block.
        activations: Device bytes of a resident run beyond the weights.
        resident: The resident run.
        theirs: The other ways.
        ours: Ours, from the least memory to everything.
        beside: Ours with the memory of each of theirs that holds the rest and two slots, by their names.
    """

    ratio: float
    weights: int
    rest: int
    slot: int
    activations: int
    resident: Point
    theirs: tuple[Point, ...]
    ours: tuple[Point, ...]
    beside: Mapping[str, Point]

    def problems(self) -> list[str]:
        """Return every requirement that does not hold."""
        found = [
            f"{point.name}: the output differs from a resident run's"
            for point in (*self.theirs, *self.ours, *self.beside.values())
            if not point.equal
        ]
        found += [f"ours, {point.name}: {point.races} races" for point in (*self.ours, *self.beside.values()) if point.races]
        for point in self.theirs:
            ours = self.beside.get(point.name)
            if ours is not None:
                weights = ours.peak - self.activations
                figures = {"step": (ours.step, point.step), "call": (ours.call, point.call), "weights": (weights, point.peak)}
                found += [
                    f"{point.name}, copies / computation {self.ratio}: our {what} {a} > {b}"
                    for what, (a, b) in figures.items()
                    if a > b * (1 + 1e-9)
                ]
        return found


def compare(ratio: float, flux: Flux | None = None, *, shares: Sequence[float] = SHARES, ways: Sequence[str] = tuple(PEERS)) -> Comparison:
    """Measure ours and other ways.

    Args:
        ratio: As `Comparison.ratio`.
        flux: The pipeline.
        shares: Where our budgets lie, 0 for the least with three slots and 1 for everything.
        ways: The other ways, by name.
    """
    return _Bench(flux or Flux(), ratio).compare(shares, ways)


class _Bench:
    def __init__(self, flux: Flux, ratio: float) -> None:
        self.flux, self.ratio = flux, ratio
        pipe = flux.make(FluxPipeline)
        self.weights = weight_bytes(pipe.transformer)
        rate = LINK_GBPS * self.weights / REAL_BYTES
        self.device = sim.install(**_SETTINGS, h2d_gbps=rate, d2h_gbps=rate, flops=1e14)
        blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
        streamed = sum(map(weight_bytes, blocks))
        self.output: torch.Tensor | None = None
        pipe.to(self.device)
        self._calibrate(pipe, streamed / (rate * 1e9) / ratio)
        self.resident = self._measure("resident", pipe)
        self.activations = self.resident.peak - weight_bytes(pipe.transformer) - weight_bytes(pipe.vae)

    def compare(self, shares: Sequence[float], ways: Sequence[str]) -> Comparison:
        theirs = tuple(self._theirs(name) for name in ways)
        ours = self.flux.make(OmniFluxPipeline)
        with ours.enable_omni_offload("layer", device=self.device) as backend:
            residency = backend._rotation.members["transformer"].owner.residency
            slot, least = residency.slot_bytes, residency.padded_bytes
            rest = least - 3 * slot
            whole = rest + sum(block.padded_bytes for block in residency.blocks)
        budgets = [(rest + 2 * slot, 2), *((round(least + share * (whole - least)), 3) for share in shares)]
        curve = tuple(self._ours(ours, f"{_mib(budget)} MiB, {slots} slots", budget, slots) for budget, slots in budgets)
        beside = {}
        for point in theirs:
            if point.peak >= rest + 2 * slot:
                room = max(min(point.peak - self.activations, whole), rest + 2 * slot)
                beside[point.name] = self._ours(ours, f"beside {point.name}", room, 3 if room >= least else 2)
        return Comparison(
            ratio=self.ratio,
            weights=self.weights,
            rest=rest,
            slot=slot,
            activations=self.activations,
            resident=self.resident,
            theirs=theirs,
            ours=curve,
            beside=beside,
        )

    def _theirs(self, name: str) -> Point:
        pipe = self.flux.make(FluxPipeline)
        PEERS[name](pipe, self.device)
        point = self._measure(name, pipe)
        pipe.remove_all_hooks()
        del pipe
        gc.collect()
        return point

    def _ours(self, pipe: Any, name: str, budget: int, slots: int) -> Point:
        with pipe.enable_omni_offload("layer", device=self.device, device_memory=budget, slots=slots):
            return self._measure(name, pipe, slots=slots)

    def _measure(self, name: str, pipe: Any, *, slots: int = 0) -> Point:
        sim.reset_races()
        for _ in range(2):
            self._call(pipe, _STEPS[0])  # theirs learn the order, ours what blocks take
        gc.collect()
        short, _ = self._call(pipe, _STEPS[0])
        torch.accelerator.reset_peak_memory_stats(self.device)
        long, output = self._call(pipe, _STEPS[1])
        if self.output is None:
            self.output = output
        return Point(
            name=name,
            peak=torch.accelerator.memory_stats(self.device)["active_bytes.all.peak"],
            step=(long - short) / (_STEPS[1] - _STEPS[0]),
            call=long,
            equal=torch.equal(output, self.output),
            races=len(sim.races()),
            slots=slots,
        )

    def _call(self, pipe: Any, steps: int) -> tuple[float, torch.Tensor]:
        draw = generator()
        embeds = torch.randn(1, 32, 64, generator=draw), torch.randn(1, 32, generator=draw)
        torch.accelerator.synchronize(self.device)
        start = sim.clock()
        with sim.trace() as spans:
            result = pipe(
                prompt_embeds=embeds[0].to(self.device),
                pooled_prompt_embeds=embeds[1].to(self.device),
                height=32,
                width=32,
                num_inference_steps=steps,
                output_type="latent",
                generator=generator(),
            )
            output = result.images.cpu()
        landed = max(span.end for span in spans if span.what == "D2H copy" and span.bytes == output.nbytes)
        torch.accelerator.synchronize(self.device)
        return landed - start, output

    def _calibrate(self, pipe: Any, seconds: float) -> None:
        """Set `flops` so that a resident step takes so long (within 0.1 %); time is nearly linear in its inverse."""
        tried: list[tuple[float, float]] = []
        inverse = 1e-11
        for _ in range(8):
            sim.configure(flops=1 / inverse)
            short, _ = self._call(pipe, _STEPS[0])
            long, _ = self._call(pipe, _STEPS[1])
            step = (long - short) / (_STEPS[1] - _STEPS[0])
            if abs(step - seconds) <= 1e-3 * seconds:
                return
            tried.append((inverse, step))
            if len(tried) == 1:
                inverse *= seconds / step
            else:
                (x0, y0), (x1, y1) = tried[-2:]
                inverse = x1 + (seconds - y1) * (x1 - x0) / (y1 - y0)
        raise RuntimeError(f"no `flops` found for {seconds} s: {tried}")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
