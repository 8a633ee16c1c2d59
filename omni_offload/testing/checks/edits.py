"""Edits of weights, between calls and between the steps of one, are in force from then on, exactly once."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import attrs
import torch

from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.checks.weights import first_weight, probes
from omni_offload.testing.observe import same_values

__all__ = ["check_edits", "check_edits_within_calls", "edit_data"]

Edit = Callable[[torch.nn.Parameter], None]


def edit_data(weight: torch.nn.Parameter) -> None:
    """Scale a weight through `.data`, which moves no version counter."""
    weight.data.mul_(1.25)


def _edit_in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(1.25)


def _assign_data(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 1.25


def _edit_one_value(weight: torch.nn.Parameter) -> None:
    weight.data.as_strided((1,), (1,), weight.data.storage_offset() + weight.numel() // 3).add_(0.5)


#: How weights are edited in a way that the next call notices by itself.
_NOTICED: tuple[tuple[str, Edit], ...] = (
    ("through .data", edit_data),
    ("in place", _edit_in_place),
    ("by assigning .data", _assign_data),
)


@attrs.frozen
class _Round:
    """Edits of one weight of every component between two calls.

    Attributes:
        edits: For each component in turn, how its weight is edited.
        refresh: Whether the user says so, by `refresh()`.
    """

    edits: tuple[tuple[str, Edit], ...]
    refresh: bool = False

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(how for how, _ in self.edits))

    def edit(self, bench: Bench, pipeline: Any) -> None:
        """Edit the weights of a pipeline."""
        for (_, module), (_, edit) in zip(probes(bench, pipeline), self.edits, strict=True):
            edit(first_weight(module))


def _rounds(bench: Bench, pipeline: Any) -> list[_Round]:
    """Return the edits that a check tries: in one round each component's in another way, the next round the next way.

    Two rounds see every way at two components or more; where there is only one component, or the run is exhaustive, each
    component's weight is edited in every way. What needs `refresh()` is a round of its own: it would hide what was not noticed.
    """
    count = sum(1 for _ in probes(bench, pipeline))
    turns = range(len(_NOTICED) if bench.exhaustive or count < 2 else 2)
    rounds = [_Round(tuple(_NOTICED[(turn + index) % len(_NOTICED)] for index in range(count))) for turn in turns]
    return [*rounds, _Round((("of one value, with refresh()", _edit_one_value),) * count, refresh=True)]


def check_edits(bench: Bench) -> None:
    """Edits of weights between calls (through .data, in place, by assignment, of one value) are in force, exactly once."""
    resident = bench.fresh()
    bench.to_device(resident)
    rounds, expected = _rounds(bench, resident), []
    for one in rounds:
        one.edit(bench, resident)
        expected.append(bench.call(resident))
    weights = [first_weight(module).detach().cpu() for _, module in probes(bench, resident)]
    if same_values(expected[0], bench.reference.outputs):
        bench.fail("a case whose outputs depend on its weights", "equal outputs after weights were edited")
    kept: dict[str, Any] = {"device_memory": 2 * bench.reference.weights, "keep_between_calls": True}
    for keys in ({}, {"pin_memory": False}, *(() if bench.by_hand(resident) else (kept,))):
        pipeline = bench.fresh()
        with bench.enabled(pipeline, **keys) as backend:
            if keys.get("pin_memory", True):
                bench.require_equal(bench.call(pipeline), when="before any edit")
            for one, wanted in zip(rounds, expected, strict=True):
                one.edit(bench, pipeline)
                if one.refresh:
                    backend.refresh()
                bench.require_equal(bench.call(pipeline), when=f"after edits {one}, with {keys}", expected=wanted)
            bench.require_equal(bench.call(pipeline), when=f"of a second call after an edit, with {keys}", expected=expected[-1])
        if not same_values([first_weight(module) for _, module in probes(bench, pipeline)], weights):
            bench.fail("the edited weights after disable", "others")


def check_edits_within_calls(bench: Bench) -> None:
    """Weights edited in place by the user's callback_on_step_end are in force from the next step on, exactly once, and kept."""
    resident = bench.fresh()
    require_callback(resident)
    bench.to_device(resident)
    expected = [_call_with_edits(bench, resident), bench.call(resident)]
    weights = [weight.detach().cpu() for weight in _edited(bench, resident)]
    if same_values(expected[1], bench.reference.outputs):
        bench.fail("a case whose outputs depend on its weights", "equal outputs after weights were edited in a call")
    for keys in ({}, *_with_residents(bench, resident)):
        pipeline = bench.fresh()
        base, pinned = bench.allocated(), bench.pinned()
        with bench.enabled(pipeline, **keys):
            found = _call_with_edits(bench, pipeline)
            bench.require_equal(found, when=f"of a call that edits weights, with {keys}", expected=expected[0])
            bench.require_left(pipeline, base, when="after a call that edits weights")
            bench.require_equal(bench.call(pipeline), when=f"of a call after one that edits weights, with {keys}", expected=expected[1])
        if not same_values(_edited(bench, pipeline), weights):
            bench.fail("the weights after disable as they were edited in a call", "others")
        bench.require_disabled(pipeline, base, pinned, times=2)


def require_callback(pipeline: Any) -> None:
    """Require that a call takes the user's callback.

    Raises:
        NotRun: It takes none.
    """
    call_of = pipeline.forward if isinstance(pipeline, torch.nn.Module) else pipeline.__call__  # a module's call tells no arguments
    if "callback_on_step_end" not in inspect.signature(call_of).parameters:
        raise NotRun(f"{type(pipeline).__name__} takes no callback_on_step_end")


def _call_with_edits(bench: Bench, pipeline: Any) -> list[torch.Tensor]:
    """Run a call in which the first step's callback edits weights; return its outputs."""
    done: list[bool] = []

    def callback(*given: Any) -> Any:
        if not done:
            done.append(True)
            for weight in _edited(bench, pipeline):
                _edit_in_place(weight)
        return given[-1] if isinstance(given[-1], dict) else {}  # what diffusers' callbacks may change

    return bench.call(pipeline, callback_on_step_end=callback)


def _edited(bench: Bench, pipeline: Any) -> list[torch.nn.Parameter]:
    """Return one weight of every component that a call uses, and one of every block that streams."""
    blocks = (operator.attrgetter(path)(pipeline) for path in bench.block_paths)
    found = [first_weight(module) for _, module in probes(bench, pipeline)]
    found += [next(block.parameters()) for block in blocks if any(True for _ in block.parameters())]
    return list({id(weight): weight for weight in found if weight.is_floating_point()}.values())


def _with_residents(bench: Bench, pipeline: Any) -> list[dict[str, Any]]:
    """Return the selector keys with which one block of every DiT stays on the device; none where no DiT streams."""
    kinds = {component.path: component.kind for component in bench.plan(pipeline).components}
    streams = any(kinds[path] == "dit" for path in bench.layouts(pipeline))
    return [{"layer_options": {"dit": {"resident_layers": 1}}}] if streams else []
