"""Audit one call of a pipeline."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from omni_offload.discovery import class_name
from omni_offload.errors import OffloadConfigError
from omni_offload.testing.audit.activity import Activity, aligned, declared_use
from omni_offload.testing.audit.declared import Declarations, Item
from omni_offload.testing.audit.findings import Advice
from omni_offload.testing.audit.parts import Part, find_parts
from omni_offload.testing.audit.places import place, public_methods
from omni_offload.testing.audit.reads import Reads
from omni_offload.testing.audit.report import AuditReport
from omni_offload.testing.audit.stacks import repeated_stacks
from omni_offload.testing.audit.weights import Weights
from omni_offload.testing.case import PipelineCase

__all__ = ["Run", "audit_pipeline"]


def audit_pipeline(case: PipelineCase, *, declarations: Declarations | None = None) -> AuditReport:
    """Make one call and list what no declaration covers: reads of weights, components and repeated stacks.

    It runs on the host, without an accelerator and without offload: weights stay where they are, and every operator is looked at.
    What counts as away is what is away while offload is enabled, in mode `module` and in mode `layer` at once. What other threads
    do is not seen.

    Args:
        case: The pipeline, with declarations or without any, and the inputs of a call.
        declarations: What is taken for declared; None: what the pipeline declares.

    Returns:
        The findings, each with what is to be added.

    Raises:
        OffloadConfigError: Declarations have the wrong form, or weights cannot be managed.
        ComponentPathError: A declared path leads nowhere.
        Exception: What the call itself raised.
    """
    return Run(case, declarations).report


class Run:
    """One audited call, and what was seen in it.

    Attributes:
        pipeline: The pipeline.
        declared: What is taken for declared.
        parts: Its components.
        ran: Its modules that ran, by id, and when each did for the first time.
        uses: The components in the order of their uses.
        callers: Public methods of the pipeline, and the components that were used in them.
        advice: What to add to the declarations.
        report: What was found.
    """

    def __init__(self, case: PipelineCase, declarations: Declarations | None = None) -> None:
        self.pipeline: Any = case.make_pipeline()
        self.declared = Declarations.of(self.pipeline) if declarations is None else declarations
        self.parts = find_parts(self.pipeline, self.declared)
        if not self.parts:
            raise OffloadConfigError(f"{class_name(self.pipeline)} of case {case.name!r} has no component with weights: nothing to audit")
        self.ran: dict[int, int] = {}
        self.callers: dict[str, set[str]] = {}
        self._weights = Weights(self.parts)
        self._reads = Reads(self.pipeline, self._weights)
        self._activity = Activity(self._changed, lambda value: aligned(value, self._reads.bring))
        self._reads.activity = self._activity
        self._call(case)
        self.uses = tuple(self._activity.uses)
        self.advice = Advice(self.pipeline, self.declared, self.parts, self.ran)
        self.report = self._make_report(case)

    def _call(self, case: PipelineCase) -> None:
        inputs = case.make_inputs(self.pipeline)
        with (
            torch.no_grad(),
            declared_use(self.pipeline, self.parts, self.declared, self._activity),
            _noting_runs(self.ran),
            self._reads.watching(),
        ):
            self.pipeline(**inputs)

    def _changed(self, part: Part) -> None:
        """Note that the use of a component begins or has ended, and whose methods of the pipeline it belongs to."""
        self._weights.renew(part)
        self._note_callers(part.path, public_methods(self.pipeline, place(self.pipeline).steps))

    def _note_callers(self, path: str, methods: Iterable[str]) -> None:
        for method in methods:
            self.callers.setdefault(method, set()).add(path)

    def _make_report(self, case: PipelineCase) -> AuditReport:
        for read in self._reads.stray.values():
            self._note_callers(read.weight.part.path, public_methods(self.pipeline, read.place.steps))
        advice = self.advice
        findings = (
            *advice.on_components(),
            *advice.on_reads(self._reads.stray.values()),
            *advice.on_stacks(),
        )
        needed = {*self._activity.needed, *self._exercised()}
        declared = [*self.declared.items()]
        return AuditReport(
            case=case.name,
            pipeline=type(self.pipeline).__name__,
            findings=findings,
            suggestions=tuple(advice.on_calls(self.callers)),
            host_reads=advice.host_reads(self._reads.on_host.values(), self._reads.stray.values()),
            needed=tuple(item for item in declared if item in needed),
            not_exercised=tuple(item for item in declared if item not in needed),
            uses=self.uses,
        )

    def _exercised(self) -> Iterator[Item]:
        """Yield the components that hold parameters, the stacks whose blocks ran and the calls that used components."""
        yield from (Item("component", part.path) for part in self.parts if part.listed and len(part.names) == 1 and _has_parameters(part))
        yield from (Item("call", "", method) for method in self.callers)
        for part in self.parts:
            if part.kind in self.advice.STREAMED:
                yield from (Item("stack", stack.path) for stack in repeated_stacks(part, self.ran))


def _has_parameters(part: Part) -> bool:
    return any(True for _ in part.module.parameters())


@contextlib.contextmanager
def _noting_runs(ran: dict[int, int]) -> Iterator[None]:
    """Note every module that is called while the body runs."""

    def note(module: nn.Module, _: Any) -> None:
        ran.setdefault(id(module), len(ran))

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
