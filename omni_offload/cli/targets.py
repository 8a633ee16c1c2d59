"""What is to be run: a registered pipeline's offline case, or a folder with a saved pipeline."""

import contextlib
import difflib
import importlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import pipelines
from omni_offload.cli.problems import InputError
from omni_offload.errors import OffloadError
from omni_offload.testing import PipelineCase
from pipelines.folder import read_folder

__all__ = ["Job", "is_folder", "load_folder", "make_job", "saved_dtype"]

_VOCABULARIES: Mapping[str, str] = {"digits": "pipelines.digits.sizes:WORDS"}
"""Entries that were trained for a few prompts only: any other would draw noise."""

_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By the names in a safetensors header."""

_LARGEST_HEADER = 100_000_000
"""Bytes: the format's own bound."""

_METADATA = "__metadata__"
"""The entry of a header that describes no tensor, but holds texts of the writer's own."""


@attrs.frozen(kw_only=True)
class Job:
    """A pipeline to make and a call to make on it; both any number of times, with equal results.

    Attributes:
        name: What was asked for.
        make_pipeline: Returns the pipeline, on the CPU.
        make_inputs: Takes the pipeline and returns fresh keyword arguments.
        outputs: Takes what the call returned and returns its tensors.
    """

    name: str
    make_pipeline: Callable[[], Any]
    make_inputs: Callable[[Any], dict[str, Any]]
    outputs: Callable[[Any], list[torch.Tensor]]


def make_job(target: str, *, prompt: str | None, steps: int | None, seed: int) -> Job:
    """Find what a target names.

    Args:
        target: A registered name, or a local folder.
        prompt: The prompt; None: the case's own.
        steps: Denoising steps; None: the case's own, or the pipeline's default.
        seed: Of the noise that a call starts from.

    Raises:
        InputError: The prompt cannot be used, or the entry has no case.
        PipelineLookupError: There is no such pipeline.
    """
    _check_text(prompt)
    entry = pipelines.registered().get(target)
    if entry is None and is_folder(target):
        return _of_folder(Path(target), prompt=prompt, steps=steps, seed=seed)
    if entry is None:
        pipelines.get(target)  # raises, with what there is
        raise InputError(f"no pipeline is registered as {target!r}")
    _check_vocabulary(target, prompt)
    cases: Sequence[PipelineCase] = entry.load_cases()
    if not cases:
        raise InputError(f"pipeline {target!r} has no offline case; give the folder of a model that it loads")
    case = cases[0]

    def make_inputs(pipeline: Any) -> dict[str, Any]:
        return _changed(case.make_inputs(pipeline), pipeline, prompt=prompt, steps=steps, seed=seed)

    return Job(name=target, make_pipeline=case.make_pipeline, make_inputs=make_inputs, outputs=case.outputs)


def is_folder(target: str) -> bool:
    """Whether a target that is no registered name is meant as a folder."""
    return os.path.exists(target) or "/" in target  # noqa: PTH110  (that of a path raises for what can be no file's name)


def _of_folder(folder: Path, *, prompt: str | None, steps: int | None, seed: int) -> Job:
    def make_inputs(pipeline: Any) -> dict[str, Any]:
        parameters = _parameters(pipeline)
        if prompt is None and "prompt" in parameters:
            raise InputError(f"{type(pipeline).__name__} makes its picture of a prompt: give one with --prompt")
        inputs = {"output_type": "pt"} if "output_type" in parameters else {}
        return _changed(inputs, pipeline, prompt=prompt, steps=steps, seed=seed)

    return Job(name=str(folder), make_pipeline=lambda: load_folder(folder), make_inputs=make_inputs, outputs=_tensors)


def load_folder(folder: Path) -> Any:
    """Load a saved pipeline in the type that most of its weights have; of one that has them in another variant only, that one.

    Raises:
        InputError: It cannot be loaded.
        PipelineLookupError: It is no folder of a pipeline, or no pipeline is registered for its class.
    """
    try:
        variant = read_folder(folder).variant()
        return pipelines.from_pretrained(folder, dtype=saved_dtype(folder), **({} if variant is None else {"variant": variant}))
    except Exception as error:  # what is in the folder decides how diffusers and transformers fail
        if isinstance(error, OffloadError):
            raise
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(f"{folder} does not load: {kind}{error}") from error


def saved_dtype(folder: Path) -> torch.dtype:
    """Return the floating type that most weights of a saved pipeline have; float32 where it holds no safetensors.

    Without it diffusers would load its own models in float32, and transformers the others as they were saved.
    """
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*.safetensors"):
        for name, entry in _header(path).items():
            if name != _METADATA and (dtype := entry.get("dtype")) in _DTYPES:
                first, last = entry["data_offsets"]
                sizes[dtype] += last - first
    return _DTYPES[sizes.most_common(1)[0][0]] if sizes else torch.float32


def _header(path: Path) -> dict[str, Any]:
    """Return what a safetensors file says of its tensors.

    Raises:
        ValueError: It is no such file.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        content = None
        if size < _LARGEST_HEADER:
            with contextlib.suppress(ValueError):
                content = json.loads(file.read(size))
    if not isinstance(content, dict) or not all(map(_describes, content, content.values())):
        raise ValueError(f"{path} is no safetensors file")
    return content


def _describes(name: str, entry: Any) -> bool:
    """Whether a header's entry is one: of a tensor, with its type and its place in the file, or the writer's own."""
    if name == _METADATA or not isinstance(entry, dict):
        return isinstance(entry, dict)
    match entry.get("dtype"), entry.get("data_offsets"):
        case str(), [int(), int()]:
            return True
    return False


def _check_text(prompt: str | None) -> None:
    if prompt is None:
        return
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("the prompt is not text: it holds bytes that are not UTF-8") from error
    if not prompt.strip():
        raise InputError("the prompt is empty; say what the picture is to show")
    if not prompt.isprintable():
        raise InputError(f"the prompt {prompt!r} is not text: it holds control characters")


def _check_vocabulary(name: str, prompt: str | None) -> None:
    if prompt is None or name not in _VOCABULARIES:
        return
    module, _, attribute = _VOCABULARIES[name].partition(":")
    words: tuple[str, ...] = getattr(importlib.import_module(module), attribute)
    if prompt in words:
        return
    close = difflib.get_close_matches(prompt.strip().lower(), words, n=1)
    if prompt.strip().isdecimal() and int(prompt) < len(words):
        close = [words[int(prompt)]]
    hint = f"did you mean {close[0]!r}?" if close else f"it knows {', '.join(words)}"
    raise InputError(f"{name} was not trained for the prompt {prompt!r}; {hint}")


def _changed(inputs: dict[str, Any], pipeline: Any, *, prompt: str | None, steps: int | None, seed: int) -> dict[str, Any]:
    """Return inputs with what the user gave put in, where the call takes it."""
    parameters = _parameters(pipeline)
    wanted = {"prompt": prompt, "num_inference_steps": steps}
    for name, value in wanted.items():
        if value is None:
            continue
        if name not in parameters:
            raise InputError(f"{type(pipeline).__name__} takes no {name.replace('num_inference_', '')}")
        inputs[name] = value
    if "generator" in parameters:
        inputs["generator"] = torch.Generator().manual_seed(seed)
    return inputs


def _parameters(pipeline: Any) -> frozenset[str]:
    return frozenset(inspect.signature(type(pipeline).__call__).parameters)


def _tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of the first field of a pipeline's output."""
    value = next(iter(result.values())) if hasattr(result, "values") else result[0]
    if isinstance(value, torch.Tensor):
        return [value]
    found = [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else []
    if not found:
        raise InputError(f"the pipeline returned no tensors but {type(value).__name__}: it makes no picture")
    return found
