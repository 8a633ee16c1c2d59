"""The source of a family: formatted as ruff formats it, whatever the length of its lines."""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import attrs

from omni_offload.config import OffloadPlan
from omni_offload.discovery import LISTS
from omni_offload.testing.scaffold.draft import Draft

__all__ = ["Family", "family_name"]

_WIDTH = 88
_SUFFIX = "Pipeline"


def family_name(pipeline_class: str) -> str:
    """Return what a family is called after the name of its class: `StableAudioPipeline` gives `stable_audio`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", pipeline_class.removesuffix(_SUFFIX) or pipeline_class)
    return words.lower()


@attrs.frozen(kw_only=True)
class Family:
    """What a family's files are made of.

    Args:
        name: Its name, which is that of its folder.
        module: Where the upstream class is imported from.
        upstream: The upstream class.
        case_module: Where the upstream case is imported from.
        case: The upstream case, or a function that returns it.
        called: Whether it is such a function.
        draft: The declarations.
        own: Names of top-level modules that are the project's own; imports of these come last.
    """

    name: str
    module: str
    upstream: str
    case_module: str
    case: str
    called: bool
    draft: Draft
    own: frozenset[str]

    @property
    def class_name(self) -> str:
        """The name of the class."""
        return f"Omni{self.upstream}"

    @property
    def constant(self) -> str:
        """The name of the case."""
        return self.name.upper()

    @property
    def files(self) -> dict[str, str]:
        """The files by name."""
        return {
            "__init__.py": f'"""{self.upstream} with weights that are offloaded."""\n',
            f"pipeline_{self.name}.py": self.pipeline_source,
            "cases.py": self.cases_source,
        }

    @property
    def pipeline_source(self) -> str:
        """The module with the class."""
        contexts = self.draft.contexts
        modules = [(self.module, self.upstream), ("omni_offload", "OffloadPlan, OmniOffloadMixin" if self._plan else "OmniOffloadMixin")]
        standard = ["import functools"] if any(not method.startswith("_") for method in contexts) else []
        abstract = ["from collections.abc import Mapping"] if self.draft.declared.entry_points else []
        typing = ["from typing import Any, ClassVar" if contexts else "from typing import ClassVar"]
        lines = [
            f'"""What a `{self.upstream}` is made of."""',
            "",
            *standard,
            *abstract,
            *typing,
            "",
            *self._imports(modules),
            "",
            f'__all__ = ["{self.class_name}"]',
            "",
            "",
            f"class {self.class_name}(OmniOffloadMixin, {self.upstream}):",
            f'    """`{self.upstream}` that owns its offloading."""',
            "",
            *self._declarations(),
        ]
        for method, components in contexts.items():
            lines += ["", *self._override(method, components)]
        return "\n".join(lines) + "\n"

    @property
    def cases_source(self) -> str:
        """The module with the case."""
        imported = self.case if self.called else f"{self.case} as UPSTREAM"
        lines = [
            f'"""A case of `{self.class_name}`: the same call, over the same components."""',
            "",
            *self._imports([("attrs", ""), (self.case_module, imported), ("pipelines", "from_pipe")]),
            "",
            f"from .pipeline_{self.name} import {self.class_name}",
            "",
            f'__all__ = ["{self.constant}"]',
            "",
            *([f"UPSTREAM = {self.case}()", ""] if self.called else []),
            "",
            f"def _make_pipeline() -> {self.class_name}:",
            f"    return from_pipe(UPSTREAM.make_pipeline(), pipeline_class={self.class_name})",
            "",
            "",
            f'{self.constant} = attrs.evolve(UPSTREAM, name="{self.name}", make_pipeline=_make_pipeline)',
            f'"""The case of `{self.upstream}`, with weights that are offloaded."""',
        ]
        return "\n".join(lines) + "\n"

    def _imports(self, modules: Iterable[tuple[str, str]]) -> list[str]:
        """Return imports in sections: others' packages, then the project's own."""

        def is_own(entry: tuple[str, str]) -> bool:
            return entry[0].partition(".")[0] in self.own

        lines: list[str] = []
        for _, section in groupby(sorted(modules, key=lambda entry: (is_own(entry), bool(entry[1]), entry[0].lower())), key=is_own):
            lines += [""] * bool(lines)
            lines += [f"from {module} import {names}" if names else f"import {module}" for module, names in section]
        return lines

    @property
    def _plan(self) -> bool:
        return self.draft.declared.plan != OffloadPlan()

    def _declarations(self) -> list[str]:
        declared = self.draft.declared
        lines = []
        for name, kind in LISTS.items():
            paths = [path for path, known in declared.components.items() if known == kind]
            if paths or kind != "resident":
                lines += _pretty(f"{name}: ClassVar[list[str]] = ", paths)
        if declared.co_residents:
            lines += _pretty("_co_resident_modules: ClassVar[list[tuple[str, ...]]] = ", [*declared.co_residents])
        if self._plan:
            fields = {field.name: getattr(declared.plan, field.name) for field in attrs.fields(OffloadPlan)}
            lines += ["", "    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan("]
            for name, value in fields.items():
                lines += _pretty(f"{name}=", sorted(value) if isinstance(value, frozenset) else value, ",", indent=8) if value else []
            lines += ["    )"]
        if declared.entry_points:
            entry_points = dict(sorted(declared.entry_points.items(), key=lambda entry: not entry[0]))
            lines += _pretty("_offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ", entry_points)
        return lines

    def _override(self, method: str, components: tuple[str, ...]) -> list[str]:
        names = " and ".join(f"`{name}`" for name in components)
        arguments = ", ".join(f'"{name}"' for name in components)
        wraps = [] if method.startswith("_") else [f"    @functools.wraps({self.upstream}.{method})"]
        return [
            *wraps,
            f"    def {method}(self, *args: Any, **kwargs: Any) -> Any:",
            f'        """Run it with {names} on the device: upstream uses weights here outside of any entry point."""',
            f"        with self.on_device({arguments}):",
            f"            return super().{method}(*args, **kwargs)",
        ]


def _pretty(before: str, value: Any, after: str = "", *, indent: int = 4) -> list[str]:
    """Return a value as source, on one line where it fits into any usual width, else with an item on each, and a comma after the last."""
    space = " " * indent
    line = f"{space}{before}{_literal(value)}{after}"
    if len(line) <= _WIDTH or isinstance(value, str):
        return [line]
    opening, closing = ("{", "}") if isinstance(value, Mapping) else ("(", ")") if isinstance(value, tuple) else ("[", "]")
    items = [(f"{_literal(key)}: ", item) for key, item in value.items()] if isinstance(value, Mapping) else [("", item) for item in value]
    rows = [row for key, item in items for row in _pretty(key, item, ",", indent=indent + 4)]
    return [f"{space}{before}{opening}", *rows, f"{space}{closing}{after}"]


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    items = ", ".join(map(_literal, value))
    if isinstance(value, tuple):
        return f"({items},)" if len(value) == 1 else f"({items})"
    return f"[{items}]"
