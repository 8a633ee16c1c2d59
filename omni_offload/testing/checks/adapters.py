"""Adapters, through the pipeline's own calls: each change is in force from the next use on, exactly once."""

import contextlib
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from omni_offload.testing.bench import Bench, NotRun

__all__ = ["check_adapters"]

_METHODS = ("load_lora_weights", "set_adapters", "fuse_lora", "unfuse_lora", "delete_adapters")
_ATTENTION = ("to_q", "to_k", "to_v")
_LAYERS = 4
_RANK = 2

#: What is done with an adapter of a component between calls, in this order.
_STEPS: tuple[tuple[str, Callable[[Any, str], Any]], ...] = (
    ("loading and weighting one", lambda pipeline, _: pipeline.set_adapters("one", 0.3)),
    ("fusing it", lambda pipeline, path: _of_component(pipeline.fuse_lora, path)),
    ("unfusing it", lambda pipeline, path: _of_component(pipeline.unfuse_lora, path)),
)


def _of_component(change: Callable[..., Any], path: str) -> None:
    """Fuse or unfuse what one component has, where that can be said: upstream's defaults name components that take no adapter, too."""
    change(**({"components": [path]} if "components" in inspect.signature(change).parameters else {}))


def check_adapters(bench: Bench) -> None:
    """Adapters loaded, weighted, fused, unfused and deleted between calls, and loaded within one, are in force, exactly once."""
    resident = bench.fresh()
    missing = [name for name in _METHODS if not callable(getattr(resident, name, None))]
    if missing:
        raise NotRun(f"the pipeline has no {', '.join(missing)}")
    if importlib.util.find_spec("peft") is None:
        raise NotRun("peft is not installed")
    path, layers = _layers(bench, resident)
    with _upstream_quiet():
        bench.to_device(resident)
        expected = dict(_live(bench, resident, path, layers))
        if torch.equal(expected["loading and weighting one"][0], bench.reference.outputs[0]):
            bench.fail("a case whose outputs depend on an adapter of its DiT", "equal outputs after one was loaded", component=path)
        kept: dict[str, Any] = {"device_memory": 2 * bench.reference.weights, "keep_between_calls": True}
        for keys in ({}, {"pin_memory": False}, {} if bench.by_hand(resident) else kept) if bench.exhaustive else ({},):
            _compare(bench, path, layers, expected, keys)


def _compare(bench: Bench, path: str, layers: list[str], expected: dict[str, list[torch.Tensor]], keys: dict[str, Any]) -> None:
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    with bench.enabled(pipeline, **keys) as backend:
        device = getattr(pipeline, "_execution_device", None)
        for what, outputs in _live(bench, pipeline, path, layers):
            bench.require_equal(outputs, when=f"after {what}, with {keys}", expected=expected[what])
            bench.require_left(pipeline, base, when=f"after {what}", count_bytes=False)
        if not backend.is_enabled() or getattr(pipeline, "_execution_device", None) != device:
            bench.fail("offload enabled on the same device after adapters came and went", "it is not", component=path)
    bench.require_disabled(pipeline, base, pinned, when="after adapters and disable", times=2)


def _live(bench: Bench, pipeline: Any, path: str, layers: list[str]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield what is done with adapters, and the outputs of the call after it, or with it."""
    component = bench.components(pipeline)[path]
    pipeline.load_lora_weights(_state(component, path, layers, seed=1), adapter_name="one")
    for what, step in _STEPS:
        step(pipeline, path)
        yield what, bench.call(pipeline)
    pipeline.delete_adapters("one")
    state = _state(component, path, layers, seed=2)

    def load(*_: Any) -> None:
        handle.remove()
        pipeline.load_lora_weights(state, adapter_name="two")

    handle = component.register_forward_hook(load)  # torch's: it runs after the component's first use has ended
    yield "deleting it, and loading another within a call", bench.call(pipeline)


def _layers(bench: Bench, pipeline: Any) -> tuple[str, list[str]]:
    """Return the component that adapters are for, and names of linear layers in it that a call uses."""
    named = (getattr(pipeline, name, None) for name in ("transformer_name", "unet_name"))
    path = next((name for name in named if name in bench.reference.probes), None)
    if path is None:
        raise NotRun("no component that a call uses is named by transformer_name or unet_name")
    component = bench.components(pipeline)[path]
    diffusers = sys.modules.get("diffusers")
    if diffusers is not None and isinstance(component, diffusers.ModelMixin) and not hasattr(component, "load_lora_adapter"):
        raise NotRun(f"diffusers loads no adapters into a {type(component).__name__}")
    linear = [name for name in bench.reference.probes[path] if type(component.get_submodule(name)) is torch.nn.Linear]
    attention = [name for name in linear if name.endswith(_ATTENTION)]
    found = (attention or linear)[:_LAYERS]
    if not found:
        raise NotRun(f"no linear layer of {path} is used in a call")
    return path, found


def _state(component: torch.nn.Module, path: str, layers: list[str], *, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of an adapter, drawn at random, A and B other than zero."""
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name in layers:
        layer: Any = component.get_submodule(name)
        dtype = layer.weight.dtype
        state[f"{path}.{name}.lora_A.weight"] = torch.randn(_RANK, layer.in_features, generator=random).to(dtype)
        state[f"{path}.{name}.lora_B.weight"] = torch.randn(layer.out_features, _RANK, generator=random).to(dtype)
    return state


@contextlib.contextmanager
def _upstream_quiet() -> Iterator[None]:
    """Keep back what diffusers and peft say of any adapter, such as that there is none for the text encoder."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`", category=UserWarning)
            yield
    finally:
        logger.setLevel(level)
