"""The same pipeline without offload, all of it on the device: what every check compares with."""

import gc
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from omni_offload.testing.observe import Target, cast_to, copied_to, device_size, tensors_in, watching

__all__ = ["Recording", "Reference", "Use", "floating_type", "make_reference"]


@attrs.frozen
class Use:
    """One use of a component during a call, and the device bytes allocated when it began."""

    name: str
    path: str
    allocated: int


@attrs.frozen
class Recording:
    """The arguments of one use, on the CPU, and the tensors that it returns when it is called with them outside of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]


@attrs.frozen(kw_only=True)
class Reference:
    """A resident run.

    Attributes:
        outputs: What the call returns, on the CPU.
        uses: The uses of components in their order, outermost ones only where they nest in one component.
        recordings: By `path.method`.
        start: Device bytes allocated with the weights on the device and before any call, as `uses` count them.
        weights: Device bytes of the components.
        activations: The most device bytes that the call takes beyond the weights.
        left: Device bytes that a call leaves allocated beyond the weights.
        copied_in: Bytes copied to the device in a call; None where they are not counted.
        copied_out: Bytes copied to the host in a call; None where they are not counted.
        probes: By component, the paths of modules in it that hold parameters and are used in a call, in order of use.
        touched: Attributes of the pipeline that a call sets.
        recast: The components that a call casts to another type and back, and their device bytes in that type.
    """

    outputs: tuple[torch.Tensor, ...]
    uses: tuple[Use, ...]
    recordings: Mapping[str, Recording]
    start: int
    weights: int
    activations: int
    left: int
    copied_in: int | None
    copied_out: int | None
    probes: Mapping[str, tuple[str, ...]]
    touched: frozenset[str]
    recast: Mapping[str, int]


def make_reference(bench: Any) -> Reference:
    """Run a case's pipeline on the device as a whole, three times: to record, to measure, to replay single uses.

    Args:
        bench: The bench of the case.
    """
    pipeline = bench.fresh()
    before = bench.allocated()
    bench.to_device(pipeline)
    weights = bench.allocated() - before
    attributes = set(vars(pipeline))
    recorder = _Recorder(bench, pipeline)
    outputs = tuple(recorder.run())
    touched = frozenset(set(vars(pipeline)) - attributes)
    gc.collect()
    start = bench.allocated()
    bench.reset_peak()
    traffic = bench.traffic()
    uses = bench.count_uses(pipeline, lambda: bench.call(pipeline, keep=False))
    peak, traffic_after = bench.peak(), bench.traffic()
    gc.collect()
    recordings = recorder.replay()
    copied = (None, None) if traffic is None else tuple(b - a for a, b in zip(traffic, traffic_after, strict=True))
    return Reference(
        outputs=outputs,
        uses=tuple(uses),
        recordings=recordings,
        start=before + weights,
        weights=weights,
        activations=peak - before - weights,
        left=max(start - before - weights, 0),
        copied_in=copied[0],
        copied_out=copied[1],
        probes=recorder.probes(),
        touched=touched,
        recast=recorder.recast(),
    )


class _Recorder:
    """Records the arguments of the first use of every method, and which inner modules run."""

    def __init__(self, bench: Any, pipeline: Any) -> None:
        self._bench = bench
        self._pipeline = pipeline
        self._targets: list[Target] = bench.targets(pipeline)
        self._given: dict[str, tuple[Target, tuple[Any, ...], dict[str, Any]]] = {}
        self._results: dict[str, Any] = {}
        self._types: dict[str, torch.dtype | None] = {}
        self._sizes: dict[str, int] = {}
        self._used: dict[str, dict[str, None]] = {}

    def run(self) -> list[torch.Tensor]:
        holders = [
            (path, name, inner) for path, module in self._bench.components(self._pipeline).items() for name, inner in _holders(module)
        ]
        first = {inner: (path, name) for path, name, inner in reversed(holders)}  # what several components hold is the first one's
        handles = [inner.register_forward_pre_hook(self._noting(*place)) for inner, place in first.items()]
        try:
            with watching(self._targets, self._around):
                result: list[torch.Tensor] = self._bench.call(self._pipeline)
                return result
        finally:
            for handle in handles:
                handle.remove()

    def probes(self) -> dict[str, tuple[str, ...]]:
        return {path: tuple(names) for path, names in self._used.items()}

    def recast(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, dtype in self._types.items():
            target, _, _ = self._given[name]
            if floating_type(target.module) is not dtype:
                path = self._bench.component_of(self._pipeline, target.path)
                found[path] = max(found.get(path, 0), self._sizes[name])
        return found

    def _noting(self, path: str, name: str) -> Callable[..., None]:
        def note(_module: torch.nn.Module, _args: Any) -> None:
            self._used.setdefault(path, {}).setdefault(name)

        return note

    def _around(self, target: Target, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target)
        first = name not in self._given
        if first:
            cpu = torch.device("cpu")
            self._given[name] = (target, copied_to(args, cpu), copied_to(kwargs, cpu))
            self._types[name] = floating_type(target.module)
            self._sizes[name] = device_size([target.module])
        result = method(*args, **kwargs)
        if first:
            self._results[name] = [tensor.detach().cpu() for tensor in tensors_in(result)]
        return result

    def replay(self) -> dict[str, Recording]:
        """Call every recorded method by itself; an autoencoder's other half takes what the one half returned.

        A component that the call casts, and casts back, takes arguments of the type that it has outside of the call.
        """
        self._add_other_halves()
        recordings = {}
        for name, (target, args, kwargs) in self._given.items():
            method, device, dtype = getattr(target.module, target.method), self._bench.device, floating_type(target.module)
            if dtype is not None and dtype is not self._types.get(name, dtype):
                args, kwargs = cast_to(args, dtype), cast_to(kwargs, dtype)  # noqa: PLW2901  (of use in no other way)
            with torch.no_grad():
                result = method(*copied_to(args, device), **copied_to(kwargs, device))
            outputs = tuple(tensor.detach().to("cpu", copy=True) for tensor in tensors_in(result))
            recordings[name] = Recording(args, kwargs, outputs)
        return recordings

    def _add_other_halves(self) -> None:
        for target in self._targets:
            other = {"encode": "decode", "decode": "encode", "forward": "decode"}.get(target.method)
            if str(target) in self._given or other is None or f"{target.path}.{other}" not in self._results:
                continue
            results = self._results[f"{target.path}.{other}"]
            if not results:
                continue
            taken = cast_to(results[0], floating_type(target.module) or results[0].dtype)
            try:
                with torch.no_grad():
                    getattr(target.module, target.method)(taken.to(self._bench.device))
            except (RuntimeError, TypeError, ValueError, AttributeError):
                continue
            self._given[str(target)] = (target, (taken,), {})


def _holders(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return path and object of the modules within a component that have parameters of their own; of a bare layer, the layer."""
    found = [(name, inner) for name, inner in module.named_modules() if any(True for _ in inner.parameters(recurse=False))]
    return [(name, inner) for name, inner in found if name] or found


def floating_type(module: torch.nn.Module) -> torch.dtype | None:
    """Return the type of a module's first floating parameter; None where it has none."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)
