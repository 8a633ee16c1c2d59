"""`omni-offload scaffold`: the folder of a family, for a pipeline class that is not registered."""

import contextlib
import importlib.util
import inspect
import json
import keyword
import sys
import tempfile
from pathlib import Path

import attrs
from rich.console import Console
from rich.text import Text

import pipelines
from omni_offload.cli.cases import import_named, importing_from_here, without_bars
from omni_offload.cli.noise import without_noise
from omni_offload.cli.problems import InputError, one_line
from omni_offload.cli.progress import shown_wait
from omni_offload.errors import OffloadError
from omni_offload.protocols import supports_component_discovery
from omni_offload.testing import AuditReport, PipelineCase, audit_pipeline
from omni_offload.testing.scaffold import Draft, Family, family_name, make_draft

__all__ = ["Scaffolded", "run_scaffold", "show_scaffold"]

_SETTINGS = ("pyproject.toml", "ruff.toml", ".ruff.toml")


@attrs.frozen(kw_only=True)
class Scaffolded:
    """What was written.

    Attributes:
        family: What the files are made of.
        files: The files.
        report: The audit of the class that was written.
    """

    family: Family
    files: tuple[Path, ...]
    report: AuditReport

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        data = {
            "family": self.family.name,
            "class": self.family.class_name,
            "case": self.family.constant,
            "files": [str(path) for path in self.files],
            "audit": json.loads(self.report.to_json()),
        }
        return json.dumps(data, indent=2)


def run_scaffold(pipeline_class: str, *, case: str, folder: Path | None, name: str | None) -> Scaffolded:
    """Write the folder of a family; the arguments are the command line's.

    Nothing is written unless the class that would be is clean in an audit, and no file is replaced.

    Raises:
        InputError: Something that the user can put right.
        OffloadError: The pipeline cannot be declared.
    """
    with without_noise(), importing_from_here(), contextlib.redirect_stdout(sys.stderr):
        upstream, built = _upstream_class(pipeline_class), without_bars(_upstream_case(case))
        name = name or family_name(upstream.__name__)
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"--name {name!r} is no name for a package; give lower-case letters, digits and '_'")
        place = (folder or Path()) / name
        _refuse_files(place, [f"pipeline_{name}.py", "cases.py", "__init__.py"])
        with shown_wait(f"auditing {built.name}, again and again", Console(stderr=True)):
            module, case_module = pipeline_class.partition(":")[0], case.partition(":")[0]
            family = Family(
                name=name,
                module=module,
                upstream=upstream.__name__,
                case_module=case_module,
                case=case.partition(":")[2],
                called=not isinstance(import_named(case), PipelineCase),
                draft=_draft(upstream, built),
                own=_own([module, case_module, "omni_offload", "pipelines", "attrs"], place),
            )
            report = _verified(family, built)
    return Scaffolded(family=family, files=_write(place, family.files), report=report)


def _upstream_class(reference: str) -> type:
    found = import_named(reference)
    if not inspect.isclass(found):
        raise InputError(f"{reference} is a {type(found).__name__} and no class; give a pipeline's class as MODULE:CLASS")
    if supports_component_discovery(found):
        raise InputError(f"{reference} declares its components already; audit it instead")
    return found


def _upstream_case(reference: str) -> PipelineCase:
    found = import_named(reference)
    try:
        made = found() if callable(found) else found
    except Exception as error:
        raise InputError(f"--case {reference} makes no case: {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(made, PipelineCase):
        raise InputError(f"--case {reference} is a {type(made).__name__}; give a PipelineCase, or a function that returns one")
    return made


def _refuse_files(place: Path, names: list[str]) -> None:
    there = [str(place / name) for name in names if (place / name).exists()]
    if there:
        verb = "exist" if len(there) > 1 else "exists"
        raise InputError(f"{', '.join(there)} {verb} already, and nothing is replaced; give another --name or --folder")


def _draft(upstream: type, case: PipelineCase) -> Draft:
    try:
        made = type(case.make_pipeline())
        draft = make_draft(case) if made is upstream else None
    except OffloadError:
        raise
    except Exception as error:
        raise InputError(f"{case.name}: the call itself fails, without any offload: {type(error).__name__}: {one_line(error)}") from error
    if draft is None:
        raise InputError(f"case {case.name!r} makes a {made.__name__}, and no {upstream.__name__}")
    return draft


def _own(modules: list[str], place: Path) -> frozenset[str]:
    """Return the top-level modules among some that are the project's own, as linters see it."""
    return frozenset(top for top in (name.partition(".")[0] for name in modules) if _is_own(top, place))


def _is_own(top: str, place: Path) -> bool:
    """Whether a module lies beside the project's settings, or in `src`."""
    parents = place.resolve().parents
    root = next((folder for folder in parents if any((folder / name).is_file() for name in _SETTINGS)), parents[0])
    return any((source / top).is_dir() or (source / f"{top}.py").is_file() for source in (root, root / "src"))


def _verified(family: Family, case: PipelineCase) -> AuditReport:
    """Audit the class that is to be written.

    Raises:
        InputError: Something is left that was not declared.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"pipeline_{family.name}.py"
        path.write_text(family.pipeline_source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise InputError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cls = getattr(module, family.class_name)
        omni = attrs.evolve(case, name=family.name, make_pipeline=lambda: pipelines.from_pipe(case.make_pipeline(), pipeline_class=cls))
        report = audit_pipeline(omni)
    if not report.clean:
        raise InputError(f"{family.upstream} cannot be scaffolded whole: {'; '.join(map(str, report.findings))}")
    return report


def _write(place: Path, files: dict[str, str]) -> tuple[Path, ...]:
    """Write all files or none.

    Raises:
        InputError: The folder takes no files, or one that is there.
    """
    with contextlib.ExitStack() as written:
        try:
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                with (place / name).open("x", encoding="utf-8") as file:
                    written.callback((place / name).unlink)
                    file.write(text)
        except OSError as error:
            raise InputError(f"{place} cannot be written: {error}") from error
        written.pop_all()
    return tuple(place / name for name in files)


def show_scaffold(made: Scaffolded, console: Console) -> None:
    """Print what was written, and what comes next."""
    for path in made.files:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    console.print(Text(str(made.report)), soft_wrap=True)
    console.print(Text(f"next: {_next_command(made)}"), soft_wrap=True)


def _next_command(made: Scaffolded) -> str:
    """Return what checks the family, from the working folder where its package can be imported from there."""
    place, here = made.files[0].parent.resolve(), Path.cwd()
    if place.is_relative_to(here):
        return f"omni-offload check {'.'.join(place.relative_to(here).parts)}.cases:{made.family.constant}"
    return f"cd {place.parent} && omni-offload check {place.name}.cases:{made.family.constant}"
