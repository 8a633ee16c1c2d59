"""Measurements of one process's memory: run as a script, it prints one JSON object.

python tests/memory/measure.py enable --heads 16 --pin
python tests/memory/measure.py cycles --count 200
python tests/memory/measure.py drop --heads 8
python tests/memory/measure.py flips --count 50
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from omni_offload.testing import sim
from pipelines.flux.cases import FLUX
from pipelines.flux.pipeline_flux import OmniFluxPipeline
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, t5_encoder
from pipelines.tiny.seeding import generator, seeded
from pipelines.tiny.tokenizers import clip_tokenizer, t5_tokenizer

__all__ = ["make_flux", "modules_of", "weight_bytes"]

_STATUS = Path("/proc/self/status")


def resident() -> int:
    """Return the process's resident bytes, after all that is unreachable is gone and free heap is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def modules_of(pipeline: Any) -> list[torch.nn.Module]:
    """Return every module of every component."""
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    return [module for part in parts for module in part.modules()]


def weight_bytes(pipeline: Any) -> int:
    """Return the bytes of a pipeline's distinct parameters and buffers."""
    tensors = {id(t): t for m in modules_of(pipeline) for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    return sum(tensor.nbytes for tensor in tensors.values())


def _hooks(pipeline: Any) -> int:
    """Count everything that could be installed on a pipeline's modules: hooks, and attributes of the objects themselves."""
    modules = modules_of(pipeline)
    return sum(len(m.__dict__) + len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules) + len(pipeline.__dict__)


def make_flux(heads: int) -> OmniFluxPipeline:
    """Build a Flux pipeline of four double and eight single blocks: 1.08 GiB for 16 heads of 64, 270 MiB for 8."""
    with seeded(0):
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=4,
            num_single_layers=8,
            attention_head_dim=64,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(16, 24, 24),
        )
        pipeline = OmniFluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=autoencoder_kl(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
            text_encoder=clip_text_encoder(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5_encoder(),
            tokenizer_2=t5_tokenizer(),
            transformer=transformer.eval(),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call(pipeline: Any) -> torch.Tensor:
    """Run one short generation."""
    arguments = {"prompt": "a red cat", "height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 16}
    return pipeline(**arguments, output_type="pt", generator=generator()).images


def _warm(device: torch.device, *, pin: bool) -> None:
    """Import, build and cache what a first use does, so that it is not counted."""
    pipeline = FLUX.make_pipeline()
    with pipeline.enable_omni_offload("module", device=device, pin_memory=pin):
        call(pipeline)


def enable(device: torch.device, *, heads: int, pin: bool) -> dict[str, int]:
    """Enable and disable a pipeline, without a call."""
    _warm(device, pin=pin)
    pipeline = make_flux(heads)
    before = resident()
    _reset_peak()
    sim.reset_counters()
    pipeline.enable_omni_offload("module", device=device, pin_memory=pin)
    peak, enabled, pinned = _status("VmHWM"), resident(), sim.pinned_bytes()
    pipeline.disable_omni_offload()
    return {
        "weights": weight_bytes(pipeline),
        "largest_component": max(sum(p.nbytes for p in c.parameters()) for c in (pipeline.transformer, pipeline.text_encoder_2)),
        "before": before,
        "peak": peak,
        "enabled": enabled,
        "pinned": pinned,
        "disabled": resident(),
        "pinned_at_the_end": sim.pinned_bytes(),
        "on_device": sim.allocated(),
    }


def _state(pipeline: Any) -> dict[str, int]:
    bytes_now = resident()
    return {
        "resident": bytes_now,
        "device": sim.allocated(),
        "pinned": sim.pinned_bytes(),
        "hooks": _hooks(pipeline),
        "objects": len(gc.get_objects()),
    }


def cycles(device: torch.device, *, count: int) -> dict[str, dict[str, int]]:
    """Enable, call and disable one pipeline many times."""
    pipeline = FLUX.make_pipeline()

    def cycle() -> None:
        with pipeline.enable_omni_offload("module", device=device):
            call(pipeline)

    for _ in range(5):
        cycle()
    before = _state(pipeline)
    for _ in range(count):
        cycle()
    return {"before": before, "after": _state(pipeline)}


def drop(device: torch.device, *, heads: int) -> dict[str, int]:
    """Let go of a pipeline that is enabled, pinned and keeps weights on the device; twice, as the first warms up the allocators."""
    _drop(device, heads)
    return _drop(device, heads)


def _drop(device: torch.device, heads: int) -> dict[str, int]:
    before, held = resident(), sim.allocated()
    pipeline = make_flux(heads)
    pipeline.enable_omni_offload("module", device=device, device_memory="8GiB", keep_between_calls=True)
    call(pipeline)
    found = {"weights": weight_bytes(pipeline), "before": before, "enabled": resident(), "pinned": sim.pinned_bytes()}
    found["on_device"] = sim.allocated() - held
    del pipeline
    after = resident()
    return {**found, "after": after, "pinned_after": sim.pinned_bytes(), "on_device_after": sim.allocated() - held}


def flips(device: torch.device, *, count: int) -> dict[str, dict[str, int]]:
    """Cast a component up and down again and again while it is managed and pinned, with a call after each cast."""
    pipeline = FLUX.make_pipeline()
    pipeline.enable_omni_offload("module", device=device, device_memory="1GiB", keep_between_calls=True)

    def flip() -> None:
        for dtype in (torch.float64, torch.float32):
            pipeline.vae.to(dtype)
            pipeline.transformer.to(dtype)
            if dtype is torch.float32:
                call(pipeline)
            else:
                with pipeline.on_device("transformer", "vae"):
                    pass

    for _ in range(5):
        flip()
    before = _state(pipeline)
    for _ in range(count):
        flip()
    after = _state(pipeline)
    pipeline.disable_omni_offload()
    return {"before": before, "after": after, "disabled": _state(pipeline)}


def main() -> None:
    """Run one measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["enable", "cycles", "drop", "flips", "all"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--pin", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = sim.install(mode="threads", races="raise")
    measurements = {
        "enable": lambda: enable(device, heads=options.heads, pin=options.pin),
        "drop": lambda: drop(device, heads=options.heads),
        "cycles": lambda: cycles(device, count=options.count),
        "flips": lambda: flips(device, count=options.count),
    }
    found = {name: measure() for name, measure in measurements.items() if options.what in (name, "all")}
    sys.stdout.write(json.dumps(found if options.what == "all" else found[options.what], indent=2) + "\n")


if __name__ == "__main__":
    main()
