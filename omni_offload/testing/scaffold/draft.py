"""What a plain pipeline is to declare: found by audits, each with what the one before it found."""

import inspect
from collections.abc import Mapping, Sequence

import attrs

from omni_offload.config import OffloadPlan, encoder_kind
from omni_offload.discovery import WELL_KNOWN
from omni_offload.errors import OffloadConfigError
from omni_offload.hooks import generator_kind
from omni_offload.protocols import TEXT_ENCODER_COMPONENT
from omni_offload.testing.audit import Declarations, Item
from omni_offload.testing.audit.parts import Part
from omni_offload.testing.audit.run import Run
from omni_offload.testing.case import PipelineCase

__all__ = ["Draft", "alternating", "make_draft"]

_MOST_ROUNDS = 8
_SMALL = ("safety_checker",)
"""Components that no list of well-known names has, and that may be None."""


@attrs.frozen(kw_only=True)
class Draft:
    """What a class is to declare, and what its code is to do.

    Attributes:
        declared: Lists, plan, entry points and co-residents.
        contexts: Methods of the pipeline that use weights by themselves, and the components that they are to have on the device.
        uses: The components in the order of their uses.
    """

    declared: Declarations
    contexts: Mapping[str, tuple[str, ...]]
    uses: tuple[str, ...]


def make_draft(case: PipelineCase) -> Draft:
    """Audit a plain pipeline until nothing is found that can be declared.

    Args:
        case: Builds the pipeline, and a call.

    Raises:
        OffloadConfigError: Something can neither be declared nor be put into code; the message names it.
        Exception: What the call itself raised.
    """
    declared, contexts = Declarations(), dict[str, tuple[str, ...]]()
    for _ in range(_MOST_ROUNDS):
        run = Run(case, declared)
        contexts = _contexts(run)
        added = _with_findings(declared, run)
        if added == declared:
            break
        declared = added
    return Draft(declared=_finished(run, declared), contexts=contexts, uses=run.uses)


def _with_findings(declared: Declarations, run: Run) -> Declarations:
    for finding in run.report.findings:
        if finding.item is None:
            raise OffloadConfigError(f"{type(run.pipeline).__name__}: {finding.component}: {finding.problem}; no class can declare that")
        declared = _with_item(declared, finding.item, run)
    return declared


def _with_item(declared: Declarations, item: Item, run: Run) -> Declarations:
    part = next(part for part in run.parts if part.names_in(item.path) is not None)
    if item.kind == "component":
        return attrs.evolve(declared, components={**declared.components, item.path: part.kind})
    if item.kind == "entry point":
        methods = (*declared.entry_points.get(item.path, ()), item.method)
        return attrs.evolve(declared, entry_points={**declared.entry_points, item.path: tuple(dict.fromkeys(methods))})
    if item.kind == "context":
        if _overridable(run.pipeline, item.method):
            return declared
        return attrs.evolve(declared, components={**declared.components, item.path: "resident"})  # nothing encloses it but the whole call
    return attrs.evolve(declared, plan=_with_block(declared.plan, item, part, run))


def _with_block(plan: OffloadPlan, item: Item, part: Part, run: Run) -> OffloadPlan:
    if item.kind == "stack":
        return _with_stacks(plan, part, run.advice.stack_names(part))
    if item.kind == "rest":
        return attrs.evolve(plan, rest_submodules=plan.rest_submodules | {item.path})
    return _with_stacks(plan, part, tuple(path.removeprefix(f"{part.path}.") for path, _ in part.blocks if path != item.path))


def _with_stacks(plan: OffloadPlan, part: Part, names: tuple[str, ...]) -> OffloadPlan:
    if part.kind == "dit":
        return attrs.evolve(plan, block_attrs={**plan.block_attrs, part.path: names})
    return attrs.evolve(plan, encoder_block_attrs={**plan.encoder_block_attrs, part.path: names})


def _contexts(run: Run) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for item in (finding.item for finding in run.report.findings):
        if item is not None and item.kind == "context" and _overridable(run.pipeline, item.method):
            found[item.method] = tuple(dict.fromkeys((*found.get(item.method, ()), item.path)))
    return found


def _overridable(pipeline: object, method: str) -> bool:
    """Whether a subclass can put a context around a method, and around less than the whole call."""
    plain = inspect.getattr_static(type(pipeline), method, None)
    return method != "__call__" and inspect.isfunction(plain) and generator_kind(plain) is None


def _finished(run: Run, declared: Declarations) -> Declarations:
    """Return declarations in the order of use, with calls, kinds of encoders, co-residents and what may be None in the case."""
    kinds = {**declared.components, **_absent(run.pipeline, declared.components)}
    first = {path: number for number, path in reversed([*enumerate(run.uses)])}
    paths = sorted(kinds, key=lambda path: first.get(path, len(run.uses)))
    residents = {path for path, kind in kinds.items() if kind == "resident"}
    plan = declared.plan
    typed = (path for path in paths if kinds[path] == "encoder" and path in run.callers.get("encode_prompt", ()))
    calls = tuple(finding.item.method for finding in run.report.suggestions if finding.item is not None)
    return attrs.evolve(
        declared,
        components={path: kinds[path] for path in paths},
        entry_points={**declared.entry_points, **({"": calls} if calls else {})},
        co_residents=tuple(alternating([path for path in run.uses if path not in residents])),
        plan=attrs.evolve(
            plan,
            block_attrs={path: names for path, names in plan.block_attrs.items() if path not in residents},
            encoder_block_attrs={path: names for path, names in plan.encoder_block_attrs.items() if path not in residents},
            encoder_component_types={path: TEXT_ENCODER_COMPONENT for path in typed if encoder_kind(path) is None},
        ),
    )


def _absent(pipeline: object, known: Mapping[str, str]) -> dict[str, str]:
    """Return the components that are None in the case, by the kinds that their names tell."""
    kinds = {name: kind for kind, names in WELL_KNOWN.items() for name in names} | dict.fromkeys(_SMALL, "encoder")
    components = getattr(pipeline, "components", {})
    return {name: kinds[name] for name, value in components.items() if value is None and name in kinds and name not in known}


def alternating(uses: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of components that take turns: each with another of its group at least twice, and that one too.

    Args:
        uses: Components in the order of their uses.
    """
    names = [*dict.fromkeys(uses)]
    groups: list[set[str]] = []
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            if _turns(uses, one, other) >= 4:
                joined = {one, other}.union(*(group for group in groups if group & {one, other}))
                groups = [group for group in groups if not group & joined]
                groups.append(joined)
    return [tuple(name for name in names if name in group) for group in groups]


def _turns(uses: Sequence[str], one: str, other: str) -> int:
    """Return how many times in a row one of two components follows upon the other, with runs of the same one counted once."""
    turns = [name for name in uses if name in (one, other)]
    return sum(index == 0 or name != turns[index - 1] for index, name in enumerate(turns))
