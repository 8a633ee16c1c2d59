"""What the site's pages get from the code when they are built: tables, and the list of records."""  # noqa: INP001  (no package)

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import attrs

from omni_offload import DiffusionParallelConfig, errors
from omni_offload.config.parallel import gather_axis, parallel_problems
from omni_offload.discovery import LISTS, WELL_KNOWN
from omni_offload.refusals import HSDP_BESIDE_OTHERS, REFUSALS
from omni_offload.testing import all_checks
from omni_offload.testing.sim import Settings
from pipelines import PipelineLookupError, registered
from pipelines.coverage import coverage

__all__ = [
    "TABLES",
    "checks",
    "decisions",
    "error_classes",
    "on_config",
    "on_page_markdown",
    "parallelism",
    "refused",
    "registered_pipelines",
    "sim_settings",
    "upstream_coverage",
    "well_known",
]

DOCS = Path(__file__).parent
LISTED = {"Decisions": "decisions", "Measurements": "benchmarks"}
"""Section of the navigation -> folder whose pages it lists."""

_LISTS = {"_encoder_modules": "encoders", "_dit_modules": "denoisers", "_vae_modules": "VAEs", "_resident_modules": "resident"}
_AXES: Mapping[str, Mapping[str, Any]] = {
    "data": {"data_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "HSDP": {"use_hsdp": True},
}
_MARKER = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """List the pages of folders that grow, and last the pages that the navigation does not name: none is out of reach."""
    for section in config.nav:
        for name, folder in LISTED.items():
            if name in section:
                pages = sorted((DOCS / folder).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
                section[name] = [str(page.relative_to(DOCS)) for page in pages]
    named = set(_named(config.nav))
    others = sorted(page.name for page in DOCS.glob("*.md") if page.name not in named)
    if others:
        config.nav.append({"More": others})
    return config


def _named(nav: Any) -> Iterator[str]:
    """Yield every page that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, Mapping) else nav if isinstance(nav, list) else ():
        yield from _named(item)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables in the place of their markers.

    Raises:
        KeyError: There is no table of that name.
    """
    return _MARKER.sub(lambda marker: TABLES[marker[1]](), markdown)


def registered_pipelines() -> str:
    """Every registered pipeline, by the class it stands for, with its components."""
    rows = []
    for entry in registered().values():
        cls = entry.load()
        lists = {word: getattr(cls, name, ()) for name, word in _LISTS.items()}
        parts = "; ".join(f"{word} {', '.join(f'`{path}`' for path in paths)}" for word, paths in lists.items() if paths)
        rows.append((f"`{entry.name}`", f"`{entry.upstream_name}`", f"`{entry.class_name}`", parts, len(entry.cases)))
    return _table(("name", "stands for", "class", "components", "offline cases"), rows)


def upstream_coverage() -> str:
    """How many pipelines of diffusers are registered, and the reason of each one that is left out."""
    found = coverage()
    line = f"{len(found.registered)} of the {found.total} pipeline classes of diffusers {found.version} are registered."
    rows = [(reason, len(names), ", ".join(f"`{name}`" for name in names)) for reason, names in found.left_out.items()]
    return f"{line}\n\n{_table(('left out because', 'how many', 'which'), rows)}"


def checks() -> str:
    """Every check of the contract, with its rule."""
    modules = dict.fromkeys(check.__module__ for check in all_checks())
    parts = []
    for name in modules:
        group = name.rpartition(".")[2].replace("_", " ")
        rows = [(f"`{check.__name__}`", _first_line(check)) for check in all_checks() if check.__module__ == name]
        parts.append(f"### {group.capitalize()}\n\n{_table(('check', 'rule'), rows)}")
    return "\n\n".join(parts)


def error_classes() -> str:
    """Every error class, with the builtin that it also is."""
    found = [*(getattr(errors, name) for name in errors.__all__), PipelineLookupError]
    classes = [cls for cls in found if isinstance(cls, type)]
    classes.sort(key=lambda cls: len(cls.__mro__))
    return _table(
        ("class", "also a", "raised when"), [(f"`{cls.__name__}`", f"`{_builtin(cls).__name__}`", _first_line(cls)) for cls in classes]
    )


def decisions() -> str:
    """Every decision record, by its heading."""
    pages = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in pages]
    return "\n".join(f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True))


def well_known() -> str:
    """The names under which components of undeclared pipelines are found."""
    rows = [(f"`{name}`", ", ".join(f"`{path}`" for path in WELL_KNOWN[kind])) for name, kind in LISTS.items() if WELL_KNOWN[kind]]
    return _table(("taken for", "names"), rows)


def sim_settings() -> str:
    """Every setting of the simulated accelerator, with its default."""
    attributes = re.split(r"^    (?=\w+: )", (inspect.getdoc(Settings) or "").partition("Attributes:\n")[2], flags=re.MULTILINE)
    meanings = {name: " ".join(text.split()) for name, _, text in (part.strip().partition(": ") for part in attributes)}
    fields = attrs.fields(Settings)
    return _table(("setting", "default", "meaning"), [(f"`{f.name}`", f"`{f.default!r}`", meanings[f.name]) for f in fields])


def parallelism() -> str:
    """Every combination of parallel axes, with who gathers in it: what the code that refuses and chooses says."""
    rows = []
    found = [names for count in range(len(_AXES)) for names in combinations(_AXES, count)]
    for names in (names for names in found if len(names) < 3 or "HSDP" not in names):  # HSDP refuses what it refuses in pairs
        sizes = {field: value for name in names for field, value in _AXES[name].items()}
        parallel = DiffusionParallelConfig(**sizes)
        if parallel_problems(parallel):
            gathers = f"refused: {HSDP_BESIDE_OTHERS.instead}"
        else:
            axis = gather_axis(parallel)
            alone = axis == "sp" and parallel.sequence_parallel_size == 1
            gathers = "nobody: each rank streams its own" if alone else f"the ranks of `{axis}`"
        rows.append((" and ".join(names) or "none", ", ".join(f"`{field}`" for field in sizes), gathers))
    return _table(("parallelism", "sizes in `parallel_config`", "who gathers a block"), rows)


def refused() -> str:
    """Every combination that distributed layerwise offload refuses, and what to do instead."""
    return _table(("request", "instead"), [(refusal.request, refusal.instead) for refusal in REFUSALS])


def _builtin(cls: type) -> type:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def _first_line(thing: Any) -> str:
    return str(thing.__doc__ or "").strip().partition("\n")[0]


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "checks": checks,
    "coverage": upstream_coverage,
    "decisions": decisions,
    "errors": error_classes,
    "parallelism": parallelism,
    "pipelines": registered_pipelines,
    "refused": refused,
    "sim_settings": sim_settings,
    "well_known": well_known,
}
"""Name in a page's marker -> what makes the table."""
