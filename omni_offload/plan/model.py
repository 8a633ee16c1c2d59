"""The one plan: which components there are, and what is done with each."""

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Self

import attrs

from omni_offload.config import DLOTransfer, OffloadConfig, OffloadStrategy, format_bytes
from omni_offload.discovery import Problems
from omni_offload.errors import OffloadConfigError, quoted
from omni_offload.plan.checks import component_problems, plan_problems

__all__ = ["PlannedComponent", "ResolvedOffloadPlan", "Treatment"]


class Treatment(str, Enum):  # noqa: UP042  (as the enums of the configuration)
    """What is done with a component while offload is enabled."""

    ROTATE = "rotate"
    """On the device while it is used."""
    STREAM = "stream"
    """Its blocks pass through device buffers; its rest rotates."""
    STAY = "stay"
    """On the device."""


def _names(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _raise_problems(subject: str, texts: list[str]) -> None:
    problems = Problems(subject)
    for text in texts:
        problems.about_config(text)
    problems.raise_any()


@attrs.frozen(kw_only=True)
class PlannedComponent:
    """One component and its treatment.

    Args:
        path: Its dotted path.
        kind: "dit", "text_encoder", "encoder" (one of no selectable kind), "vae" or "resident".
        treatment: What is done with it.
        aliases: Other declared paths of the same module.
        reason: Why this treatment, for people.
        block_paths: Full paths of the containers, or single blocks, that stream; in execution order as declared.
        rest_paths: Full paths of modules inside blocks that stay with the rest.
        resident_layers: Blocks that stay while it is in use; None: as many as the budget allows, none without one.
        transfer: How a block reaches the device; None where the strategy is not distributed or nothing streams.
        on_demand: Whether it has `load_to_device` and `offload_to_cpu`, and the pipeline drives it.
        weight_bytes: Unpadded bytes of its distinct parameters and buffers.

    Raises:
        OffloadConfigError: A value is of another type, or two contradict each other; the message names every problem.
    """

    path: str
    kind: str
    treatment: Treatment = attrs.field(converter=Treatment)
    aliases: tuple[str, ...] = attrs.field(default=(), converter=_names)
    reason: str
    block_paths: tuple[str, ...] = attrs.field(default=(), converter=_names)
    rest_paths: tuple[str, ...] = attrs.field(default=(), converter=_names)
    resident_layers: int | None = None
    transfer: DLOTransfer | None = attrs.field(default=None, converter=attrs.converters.optional(DLOTransfer))
    on_demand: bool = False
    weight_bytes: int

    def __attrs_post_init__(self) -> None:
        _raise_problems(f"Planned component {quoted(self.path)}", component_problems(self))


@attrs.frozen(kw_only=True)
class ResolvedOffloadPlan:
    """What an enabled backend does, decided before anything is touched.

    The resolver makes it, a planner may make it, and the executor runs it. It holds names and numbers only, so that it
    can be stored, compared and agreed on by ranks.

    Args:
        pipeline_class: Module and qualified name of the pipeline's class.
        strategy: The backend.
        config: The configuration it was resolved from.
        components: Encoders, DiTs, VAEs, residents, each in declared order; without those that hold no bytes.
        co_residents: Groups of paths that are onloaded together.
        entry_points: Path of a component or submodule and its methods that count as work.
        call_methods: Methods of the pipeline itself that count as a call.

    Raises:
        OffloadConfigError: A value is of another type, or two contradict each other; the message names every problem.
    """

    pipeline_class: str
    strategy: OffloadStrategy
    config: OffloadConfig
    components: tuple[PlannedComponent, ...]
    co_residents: tuple[tuple[str, ...], ...] = ()
    entry_points: tuple[tuple[str, tuple[str, ...]], ...] = ()
    call_methods: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        _raise_problems("The plan", plan_problems(self))

    def component(self, path: str) -> PlannedComponent:
        """The component of a path or alias.

        Args:
            path: A declared path.

        Raises:
            KeyError: There is none.
        """
        for component in self.components:
            if path == component.path or path in component.aliases:
                return component
        raise KeyError(path)

    def treated(self, treatment: Treatment) -> tuple[PlannedComponent, ...]:
        """The components of one treatment, in the plan's order."""
        return tuple(component for component in self.components if component.treatment is treatment)

    def to_json(self) -> str:
        """The plan as canonical JSON: equal plans give equal text."""
        return json.dumps(_plain(attrs.asdict(self)), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Args:
            text: JSON; of this version of the package.

        Returns:
            An equal plan.

        Raises:
            OffloadConfigError: The text is no such plan.
        """
        try:
            return cls(**_read(json.loads(text)))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise OffloadConfigError(
                f"A plan was to be read from JSON, and the text is no plan ({error}); give what to_json wrote"
            ) from error

    def digest(self) -> str:
        """The plan's SHA-256, in hexadecimal: equal for equal plans, on every rank."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def lines(self) -> list[str]:
        """Return every value on a line of its own, `path: value`."""
        return [f"{name}: {value}" for name, value in _flat(self).items()]

    def diff(self, other: "ResolvedOffloadPlan") -> str:
        """What differs in another plan.

        Args:
            other: The other plan.

        Returns:
            A line for each differing value, `path: here -> there`; empty where the plans are equal.
        """
        here, there = _flat(self), _flat(other)
        names = [*here, *(name for name in there if name not in here)]
        lines = ((name, here.get(name, "(none)"), there.get(name, "(none)")) for name in names)
        return "\n".join(f"{name}: {old} -> {new}" for name, old, new in lines if old != new)

    def __str__(self) -> str:
        width = max(len(component.path) for component in self.components)
        head = f"{self.pipeline_class.rpartition('.')[2]}: {self.strategy.value}"
        rows = (
            f"  {component.path:<{width}}  {component.kind:<12}  {component.treatment.value:<6}  "
            f"{format_bytes(component.weight_bytes):>10}  {component.reason}"
            + (f" ({', '.join(component.block_paths)})" if component.block_paths else "")
            for component in self.components
        )
        groups = (f"  together: {', '.join(group)}" for group in self.co_residents)
        return "\n".join([head, *rows, *groups])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **fields,
        "strategy": OffloadStrategy(fields["strategy"]),
        "config": OffloadConfig.from_fields(fields["config"]),
        "components": tuple(PlannedComponent(**component) for component in fields["components"]),
        "co_residents": _frozen(fields["co_residents"]),
        "entry_points": _frozen(fields["entry_points"]),
        "call_methods": _frozen(fields["call_methods"]),
    }


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _flat(plan: ResolvedOffloadPlan) -> dict[str, str]:
    fields = attrs.asdict(plan, recurse=True)
    lines = {f"config.{name}": _text(value) for name, value in fields.pop("config").items()}
    for component in fields.pop("components"):
        path = component.pop("path")
        lines |= {f"components[{path}].{name}": _text(value) for name, value in component.items()}
    lines["components"] = ", ".join(component.path for component in plan.components)
    return {**{name: _text(value) for name, value in fields.items()}, **lines}


def _text(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)
