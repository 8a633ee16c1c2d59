"""From what was seen to what is to be declared."""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import attrs

from omni_offload.discovery import class_name
from omni_offload.testing.audit.declared import Declarations, Item
from omni_offload.testing.audit.parts import Part, list_name, loose_parameters
from omni_offload.testing.audit.places import Place, method_in
from omni_offload.testing.audit.reads import StrayRead
from omni_offload.testing.audit.report import Finding, HostRead
from omni_offload.testing.audit.stacks import Stack, repeated_stacks, undeclared, with_stack

__all__ = ["Advice"]


@attrs.frozen
class Advice:
    """What to add to the declarations of a pipeline.

    Args:
        pipeline: The pipeline.
        declared: What it declares.
        parts: Its components.
        ran: Its modules that ran, by id, and when each did for the first time.
    """

    STREAMED: ClassVar[tuple[str, ...]] = ("dit", "encoder")

    pipeline: object
    declared: Declarations
    parts: tuple[Part, ...]
    ran: Mapping[int, int]

    def on_components(self) -> Iterator[Finding]:
        """Yield every component that stands in no list, and parameters that lie in none."""
        for path, text in loose_parameters(self.pipeline, self.declared, self.parts).items():
            yield Finding(item=None, component=path, problem=f"{text}, in no component", line="a module of their own, and list that")
        for part in self.parts:
            if not part.listed:
                listed = [path for path, kind in self.declared.components.items() if kind == part.kind]
                yield Finding(
                    item=Item("component", part.path),
                    component=part.path,
                    problem=f"{class_name(part.module)}, holds weights and stands in no list",
                    line=f"{list_name(part.kind)} = {_strings([*listed, part.path])}",
                )

    def on_reads(self, reads: Iterable[StrayRead]) -> Iterator[Finding]:
        """Yield the reads that no declaration covers, together where the same line covers them."""
        together: dict[tuple[str, str], list[StrayRead]] = {}
        advised: dict[tuple[str, str], tuple[Item | None, str]] = {}
        for read in reads:
            item, line = self._cover_block(read) if read.of_block else self._cover(read)
            key = read.weight.part.path, line
            advised[key] = item, line
            together.setdefault(key, []).append(read)
        for (path, line), found in together.items():
            number = len(found)
            away = "the block did not run" if found[0].of_block else "the component was not in use"
            names = f"{found[0].weight.name}{f' and {number - 1} more' if number > 1 else ''}"
            yield Finding(
                item=advised[path, line][0],
                component=path,
                problem=f"{names} {'were' if number > 1 else 'was'} read while {away}",
                tensors=tuple(read.weight.name for read in found),
                calls=found[0].place.path,
                where=found[0].place.where,
                line=line,
            )

    def _cover(self, read: StrayRead) -> tuple[Item | None, str]:
        """Return what brings a component for a read: an entry point, or a context around the pipeline's own code."""
        part = read.weight.part
        method = method_in(part, read.place.steps)
        if method is None:
            return self._context(part, read.place)
        path, name = method
        names = dict.fromkeys((*self.declared.entry_points.get(path, ()), name))
        return Item("entry point", path, name), f'_offload_entry_points = {{"{path}": {_tuple(names)}}}'

    def _context(self, part: Part, place: Place) -> tuple[Item | None, str]:
        step = place.by_pipeline(self.pipeline)
        code = f"{step} ({step.where})" if step is not None else place.where
        item = Item("context", part.path, step.method) if step is not None else None
        return item, f'with self.on_device("{part.path}"): around the use in {code}'

    def _cover_block(self, read: StrayRead) -> tuple[Item | None, str]:
        """Return what keeps a weight in a block with the rest: its module, or the block as a whole."""
        part, path = read.weight.part, str(read.weight.block)
        block = next(block for name, block in part.blocks if name == path)
        names = {id(module): name for name, module in block.named_modules() if name}
        entered = next((names[id(step.owner)] for step in read.place.steps if id(step.owner) in names), None)
        holder = entered or read.weight.name.removeprefix(f"{path}.").rpartition(".")[0]
        if holder:
            item = Item("rest", f"{path}.{holder}")
            return item, f"OffloadPlan(rest_submodules={_strings(sorted({*self.declared.plan.rest_submodules, item.path}))})"
        field = "block_attrs" if part.kind == "dit" else "encoder_block_attrs"
        return Item("whole", path), f"OffloadPlan({field}=...) with the blocks of {part.path!r} one by one, and without {path!r}"

    def on_stacks(self) -> Iterator[Finding]:
        """Yield every repeated stack of denoisers and encoders that is not declared."""
        for part in self.parts:
            field = "block_attrs" if part.kind == "dit" else "encoder_block_attrs"
            for stack in self._missing(part):
                blocks = f"{len(stack.blocks)} x {'/'.join(sorted({class_name(block) for block in stack.blocks}))}"
                yield Finding(
                    item=Item("stack", stack.path),
                    component=part.path,
                    problem=f"{stack.path} ({blocks}) is not declared as blocks",
                    line=f'OffloadPlan({field}={{"{part.path}": {_tuple(self.stack_names(part))}}})',
                )

    def stack_names(self, part: Part) -> tuple[str, ...]:
        """Return the names of a component's stacks, the declared ones and those that are not, in the order in which they ran."""
        stacks: Mapping[str, tuple[str, ...]] = (
            self.declared.plan.block_attrs if part.kind == "dit" else self.declared.plan.encoder_block_attrs
        )
        names = next((stacks[name] for name in part.names if name in stacks), ())
        for stack in self._missing(part):
            names = with_stack(names, part, stack, self.ran)
        return names

    def _missing(self, part: Part) -> list[Stack]:
        return undeclared(part, repeated_stacks(part, self.ran)) if part.kind in self.STREAMED else []

    def on_calls(self, callers: Mapping[str, set[str]]) -> Iterator[Finding]:
        """Yield the pipeline's public methods that use components, and count as no call: they need not, if nobody calls them alone."""
        calls = self.declared.entry_points.get("", ())
        for method, used in callers.items():
            if method not in calls:
                yield Finding(
                    item=Item("call", "", method),
                    component=", ".join(sorted(used)),
                    problem=f"called by itself, {type(self.pipeline).__name__}.{method} leaves it on the device",
                    line=f'_offload_entry_points = {{"": {_tuple(dict.fromkeys((*calls, method)))}}}',
                )

    def host_reads(self, reads: Iterable[StrayRead], stray: Iterable[StrayRead]) -> tuple[HostRead, ...]:
        """Return the reads that are right on the host."""
        wrong = {read.weight.name for read in stray}
        return tuple(
            HostRead(tensor=read.weight.name, calls=read.place.path, where=read.place.where)
            for read in reads
            if read.weight.name not in wrong
        )


def _strings(values: Iterable[str]) -> str:
    names = ", ".join(f'"{value}"' for value in values)
    return f"[{names}]"


def _tuple(values: Iterable[str]) -> str:
    names = [f'"{value}"' for value in values]
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"
