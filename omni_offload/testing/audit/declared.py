"""What a pipeline declares, as the audit takes it: as it stands on the class, or with a part put in or left out."""

from collections.abc import Iterator, Mapping
from typing import Self

import attrs

from omni_offload.config import OffloadPlan
from omni_offload.discovery import Problems, class_name, declared_co_residents, declared_entry_points, declared_lists
from omni_offload.plan.declared import pipeline_plan

__all__ = ["Declarations", "Item"]


@attrs.frozen
class Item:
    """One thing that is declared, or should be.

    Args:
        kind: "component", "entry point", "call", "stack", "rest", or what has no list: "context", a method of the pipeline that is to
            have a component on the device, and "whole", a block that is to be no block.
        path: The component, the module with the entry point, the stack, the block or the module in one; "" for a call.
        method: Of an entry point, a call or a context.
    """

    kind: str
    path: str
    method: str = ""

    def __str__(self) -> str:
        name = f"{self.path}.{self.method}" if self.path and self.method else self.path or self.method
        return f"{self.kind} {name}"


@attrs.frozen(kw_only=True)
class Declarations:
    """What a pipeline declares.

    Args:
        components: Path -> kind, in the order of the lists.
        plan: The offload plan.
        entry_points: Path -> methods, as `_offload_entry_points`.
        co_residents: As `_co_resident_modules`.
    """

    components: Mapping[str, str] = attrs.field(factory=dict)
    plan: OffloadPlan = attrs.field(factory=OffloadPlan)
    entry_points: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    co_residents: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, pipeline: object) -> Self:
        """Read them off a pipeline; one that declares nothing has none.

        Raises:
            ComponentPathError: A path stands twice, or in another one.
            OffloadConfigError: A declaration has the wrong form. Either way the message names every problem.
        """
        problems = Problems(f"Declarations of {class_name(pipeline)}")
        lists = declared_lists(pipeline, problems)
        found = cls(
            components={path: kind for kind, paths in lists.items() for path in paths},
            plan=pipeline_plan(pipeline, problems),
            entry_points=declared_entry_points(pipeline, problems),
            co_residents=tuple(declared_co_residents(pipeline, problems)),
        )
        problems.raise_any()
        return found

    def items(self) -> Iterator[Item]:
        """Yield everything that an audit can miss, but the stacks that model classes declare themselves."""
        yield from (Item("component", path) for path in self.components)
        for path, methods in self.entry_points.items():
            yield from (Item("entry point" if path else "call", path, method) for method in methods)
        for stacks in (self.plan.block_attrs, self.plan.encoder_block_attrs):
            yield from (Item("stack", f"{path}.{name}") for path, names in stacks.items() for name in names)
        yield from (Item("stack", f"{child}.{name}") for child, name in self.plan.offload_submodules.items())
        yield from (Item("rest", path) for path in sorted(self.plan.rest_submodules))

    def without(self, item: Item) -> Self:
        """Return them with one thing left out."""
        plan = self.plan
        stacks = {
            field: {
                path: tuple(name for name in names if item != Item("stack", f"{path}.{name}"))
                for path, names in getattr(plan, field).items()
            }
            for field in ("block_attrs", "encoder_block_attrs")
        }
        return attrs.evolve(
            self,
            components={path: kind for path, kind in self.components.items() if item != Item("component", path)},
            entry_points={
                path: tuple(name for name in names if item != Item("entry point" if path else "call", path, name))
                for path, names in self.entry_points.items()
            },
            plan=attrs.evolve(
                plan,
                **stacks,
                offload_submodules={p: name for p, name in plan.offload_submodules.items() if item != Item("stack", f"{p}.{name}")},
                rest_submodules=plan.rest_submodules - ({item.path} if item.kind == "rest" else set()),
            ),
        )
