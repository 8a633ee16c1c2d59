"""What is to be checked: cases of registered pipelines, of importable modules, or made for folders with saved pipelines."""

import contextlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import torch

import pipelines
from omni_offload.cli.problems import InputError, one_line
from omni_offload.cli.targets import is_folder, load_folder
from omni_offload.testing import PipelineCase

__all__ = ["Subject", "find_subjects", "import_named", "importing_from_here", "without_bars"]

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@attrs.frozen(kw_only=True)
class Subject:
    """A case to check.

    Attributes:
        target: What named it.
        case: The case.
        weight_bytes: About how large its weights are; 0: as small as those of cases are by design.
    """

    target: str
    case: PipelineCase
    weight_bytes: int = 0


def without_bars(case: PipelineCase) -> PipelineCase:
    """Return a case whose pipelines show no progress of their own."""

    def make_pipeline() -> Any:
        pipeline = case.make_pipeline()
        if hasattr(pipeline, "set_progress_bar_config"):
            pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return attrs.evolve(case, make_pipeline=make_pipeline)


def find_subjects(targets: Sequence[str], *, every: bool) -> tuple[list[Subject], list[str]]:
    """Find the cases that targets name, in their order.

    Args:
        targets: Registered names, folders, or `package.module:CASE`.
        every: All registered pipelines; then there are no targets.

    Returns:
        The cases, and (`every`) the names of the registered pipelines that have none.

    Raises:
        InputError: A target names no case.
        PipelineLookupError: There is no such pipeline.
    """
    if every == bool(targets):
        problem = "both targets and --all were given" if every else "nothing to check was given"
        raise InputError(f"{problem}; name pipelines, folders or MODULE:CASE, or give --all for: {', '.join(pipelines.registered())}")
    if every:
        entries = pipelines.registered()
        found = [Subject(target=name, case=case) for name, entry in entries.items() for case in entry.load_cases()]
        return found, [name for name, entry in entries.items() if not entry.cases]
    return [subject for target in dict.fromkeys(targets) for subject in _named(target)], []


def _named(target: str) -> list[Subject]:
    entry = pipelines.registered().get(target)
    if entry is not None:
        if not entry.cases:
            raise InputError(f"pipeline {target!r} has no case; give the folder of a model that it loads, or a case as MODULE:CASE")
        return [Subject(target=target, case=case) for case in entry.load_cases()]
    if _REFERENCE.fullmatch(target) and not os.path.exists(target):  # noqa: PTH110  (as in `is_folder`)
        return [Subject(target=target, case=case) for case in _imported(target)]
    if is_folder(target):
        case = _of_folder(Path(target))
        size = sum(file.stat().st_size for file in Path(target).rglob("*.safetensors"))
        return [Subject(target=target, case=case, weight_bytes=size)]
    pipelines.get(target)  # raises, with what there is
    raise InputError(f"no pipeline is registered as {target!r}")


# ---- modules -------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def importing_from_here() -> Iterator[None]:
    """Find modules in the working folder too, as `python -m` does; the path is as before when the body ends."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _imported(reference: str) -> list[PipelineCase]:
    module, found = _attribute(reference)
    listed = list(found) if isinstance(found, list | tuple) else [found]
    cases = [case for case in listed if isinstance(case, PipelineCase)]
    if cases and len(cases) == len(listed):
        return cases
    known = [key for key, value in vars(module).items() if isinstance(value, PipelineCase)]
    what = f"has no {reference.partition(':')[2]!r}"
    if found is not None:
        what = f"has {reference.partition(':')[2]!r}, a {type(found).__name__} and no PipelineCase"
    raise InputError(f"{reference}: module {module.__name__!r} {what}; its cases are: {', '.join(known) or 'none'}")


def import_named(reference: str) -> Any:
    """Import what a reference names.

    Args:
        reference: `package.module:NAME`.

    Raises:
        InputError: It names nothing, or its module does not import.
    """
    if not _REFERENCE.fullmatch(reference):
        raise InputError(f"{reference!r} is no MODULE:NAME, such as package.module:NAME")
    module, found = _attribute(reference)
    if found is None:
        raise InputError(f"{reference}: module {module.__name__!r} has no {reference.partition(':')[2]!r}")
    return found


def _attribute(reference: str) -> tuple[ModuleType, Any]:
    """Return a module and what it has under a name; None where it has nothing."""
    name, _, attribute = reference.partition(":")
    try:
        module = importlib.import_module(name)
        return module, getattr(module, attribute, None)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InputError(f"{reference}: there is no module {error.name!r} in the working folder or among what is installed") from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"{reference}: {name} does not import: {type(error).__name__}: {one_line(error)} ({frame.filename}, line {frame.lineno})"
        ) from error


# ---- folders -------------------------------------------------------------------------------------------------------------------


def _of_folder(folder: Path) -> PipelineCase:
    """Make a case for a saved pipeline: called as the first registered case of its class whose call it takes."""

    def make_pipeline() -> Any:
        pipeline = load_folder(folder)
        if hasattr(pipeline, "set_progress_bar_config"):
            pipeline.set_progress_bar_config(disable=True)
        return pipeline

    pipeline, problems = make_pipeline(), []
    for model in _cases_for(type(pipeline)):
        try:
            _try(pipeline, model)
        except Exception as error:  # noqa: BLE001  (whatever does not fit)
            problems.append(f"{model.name}: {one_line(error)}")
        else:
            return attrs.evolve(model, name=folder.name, make_pipeline=make_pipeline, expected_failures={})
    raise InputError(
        f"{folder}: a {type(pipeline).__name__} that no registered case's call fits ({'; '.join(problems) or 'there is none'}); "
        "write a PipelineCase for it and give MODULE:CASE"
    )


def _cases_for(cls: type) -> list[PipelineCase]:
    """Return the registered cases of a class, those of pipelines that are named as its family first."""
    entries = [entry for entry in pipelines.registered().values() if entry.class_name == cls.__name__ and entry.load() is cls]
    entries.sort(key=lambda entry: f".{entry.name}." not in f"{cls.__module__}.")
    return [case for entry in entries for case in entry.load_cases()]


def _try(pipeline: Any, model: PipelineCase) -> None:
    with torch.no_grad():
        if not model.outputs(pipeline(**model.make_inputs(pipeline))):
            raise ValueError("the call made no tensors")
