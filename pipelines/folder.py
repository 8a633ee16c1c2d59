"""What a folder with a saved pipeline holds, and what of it is refused: no code of it runs, and no pickle is read."""

import importlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from pipelines.entry import PipelineLookupError

__all__ = ["SavedPipeline", "WeightFile", "read_folder"]

_INDEX = "model_index.json"
_SAFE = "safetensors"
_PICKLED = frozenset({"bin", "ckpt", "pt", "pth", "pkl", "pickle"})
"""How names of files end that are read by unpickling, which runs what the file says."""

_LOADED = frozenset({"diffusion_pytorch_model", "model"})
"""How the names of safetensors begin that diffusers and transformers load."""

_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_LIBRARIES = frozenset({"diffusers", "transformers"})
_MAKE_OTHERS = re.compile(r"Auto\w*|\w*Processor")
"""Classes that look up, by what their folder says, which class they make, or which their parts have."""


@attrs.frozen
class WeightFile:
    """A file with weights, by its name: `<stem>[.<variant>][-00001-of-00002].<suffix>`."""

    path: Path
    stem: str
    variant: str | None
    suffix: str

    @property
    def loadable(self) -> bool:
        """Whether a component's weights are looked for under this name, as safetensors."""
        return self.suffix == _SAFE and self.stem in _LOADED


@attrs.frozen
class SavedPipeline:
    """A folder with a saved pipeline.

    Args:
        folder: Where it is.
        class_name: The pipeline's class, upstream's or ours.
        components: Name of each component that was not None, with the library and the class that its index gives.
        others: What else stands in the index: settings, components that were None, and what is neither.
    """

    folder: Path
    class_name: str
    components: Mapping[str, tuple[str, str]]
    others: Mapping[str, Any]

    def weight_files(self, component: str) -> list[list[WeightFile]]:
        """Return the files with weights of each model of a component: in folders of its name, else beside the index."""
        several = self.components[component][1].startswith("Multi")  # several models as one: controlnet, controlnet_1
        folders = [self.folder / component, *(sorted(self.folder.glob(f"{component}_[0-9]*")) if several else ())]
        present = [_files_in(folder) for folder in folders if folder.is_dir()]
        return present or [[file for file in _files_in(self.folder) if file.stem in (*_LOADED, "pytorch_model")]]

    def files_read(self, component: str, *, variant: str | None) -> list[Path]:
        """Return the safetensors that a component's weights are read from."""
        chosen = [file for files in self.weight_files(component) for file in _chosen(files, variant)]
        return [file.path for file in chosen if file.loadable]

    def variant(self) -> str | None:
        """Return the variant to load where none is asked for: none where that is complete, else the first that is."""
        models = [files for name in self.components for files in self.weight_files(name)]
        stored = [variants for files in models if (variants := {file.variant for file in files if file.loadable})]
        names = sorted({name for variants in stored for name in variants if name is not None})
        if all(None in variants for variants in stored):
            return None
        return next((name for name in names if all(variants & {name, None} for variants in stored)), None)

    def refuse_what_runs(self, *, given: Mapping[str, Any], variant: str | None, names: Collection[str] = ()) -> None:
        """Refuse a folder that would have code run, or pickles read, or whose index names no classes.

        Args:
            given: Arguments of the load; a component among them is not loaded from the folder.
            variant: The variant that is asked for.
            names: The components that the pipeline's class takes.

        Raises:
            PipelineLookupError: It would; every such component is named, with the file.
        """
        problems = [*self._malformed(names)]
        pickles: list[str] = []
        for name, (library, class_name) in self.components.items():
            if given.get(name, name) is not None:
                problems += _foreign(name, library, class_name)
            if name not in given:
                problems += [*self._code(name, library, class_name), *self._others(name), *self._shards(name, variant)]
                for files in self.weight_files(name):
                    pickles += self._pickles(files, variant)
                    problems += _in_another_variant(name, files, variant)
        if pickles:
            problems.append(
                f"{', '.join(pickles)}: pickles run code when they are read, so nothing was read. Where you trust them, convert them once "
                f"with plain diffusers: {self.class_name.removeprefix('Omni')}.from_pretrained(folder, use_safetensors=False)"
                ".save_pretrained(other_folder) writes safetensors"
            )
        if problems:
            raise PipelineLookupError(f"cannot load {str(self.folder)!r}: {'; '.join(problems)}")

    def _malformed(self, names: Collection[str]) -> Iterator[str]:
        """Yield which components stand in the index without their class."""
        for name, value in self.others.items():
            if name in names and value != [None, None]:
                yield f"{_INDEX} has {value!r} for component {name!r}, and no names of a library and a class"

    def _code(self, name: str, library: str, class_name: str) -> Iterator[str]:
        """Yield why loading a component would run code that the folder brings."""
        scripts = [script for script in [self.folder / name / f"{library}.py"] if script.exists()]
        if _MAKE_OTHERS.fullmatch(class_name):
            scripts += [file for file in _json_files(self.folder / name) if "auto_map" in _json(file)]
        for script in scripts[:1]:
            yield (
                f"{script.relative_to(self.folder)} would have component {name!r} made by code of the folder, and none is run: read "
                f"it, make the component yourself, and give it to from_pretrained({name}=...)"
            )

    def _others(self, name: str) -> Iterator[str]:
        """Yield why loading a component would load other models, whose files are not looked at."""
        index, adapter = self.folder / name / _INDEX, self.folder / name / "adapter_config.json"
        if index.is_file():
            yield (
                f"component {name!r} is a pipeline of its own, with an index ({name}/{_INDEX}) of further components: load that folder "
                f"first, and give the pipeline to from_pretrained({name}=...)"
            )
        base = _json(adapter).get("base_model_name_or_path")
        if base is not None and Path(str(base)).absolute() != (self.folder / name).absolute():
            yield (
                f"{name}/{adapter.name} has the weights beside it added to those of another model, {base}: load that one first, and give "
                f"it to from_pretrained({name}=...)"
            )

    def _pickles(self, files: Collection[WeightFile], variant: str | None) -> Iterator[str]:
        """Yield the first file of a component's model that is a pickle, where its weights are not read from safetensors."""
        chosen = _chosen(files, variant)
        if not any(file.loadable for file in chosen):
            yield from [str(file.path.relative_to(self.folder)) for file in chosen or files if file.suffix in _PICKLED][:1]

    def _shards(self, name: str, variant: str | None) -> Iterator[str]:
        """Yield what is wrong with the files that an index of shards names."""
        chosen = variant if any(file.variant == variant for files in self.weight_files(name) for file in files) else None
        ending = f".{_SAFE}.index.json" if chosen is None else f".{_SAFE}.index.{chosen}.json"
        for index in _json_files(self.folder / name):
            named = _json(index).get("weight_map") if index.name.endswith(ending) else None
            for shard in sorted(set(map(str, named.values()))) if isinstance(named, dict) else ():
                if Path(shard).name != shard or not shard.endswith(f".{_SAFE}"):
                    yield f"{index.relative_to(self.folder)} names {shard!r} as a shard, which is no safetensors beside it"
                elif not (index.parent / shard).is_file():
                    yield f"{index.relative_to(self.folder)} names {shard!r}, which is not there: the folder is not complete"


def _chosen(files: Collection[WeightFile], variant: str | None) -> list[WeightFile]:
    """Return the files that are read, as diffusers chooses: those of the variant, else those without one."""
    return [file for file in files if file.variant == variant] or [file for file in files if file.variant is None]


def _in_another_variant(name: str, files: Collection[WeightFile], variant: str | None) -> Iterator[str]:
    """Yield what to ask for where a component's weights are there as safetensors, but not as was asked."""
    others = sorted({str(file.variant) for file in files if file.loadable})
    if others and not any(file.loadable for file in _chosen(files, variant)):
        there = ", ".join(f"variant={other!r}" for other in others)
        yield f"component {name!r} has its weights as {there}, not as variant={variant!r}: ask for that"


def _foreign(name: str, library: str, class_name: str) -> Iterator[str]:
    """Yield why the class of a component is not imported, or is none."""
    if library in _LIBRARIES or library in sys.modules:
        found = getattr(importlib.import_module(library), class_name, None)
        if found is not None and not isinstance(found, type):
            yield f"component {name!r} is to be a {class_name} of {library!r}, which is no class there"
        return
    from diffusers import pipelines as upstream  # noqa: PLC0415  (importing this package imports no diffusers)

    if not hasattr(upstream, library):  # what is defined there is saved under its module's name
        yield (
            f"component {name!r} is a {class_name} of module {library!r}, which is neither diffusers nor transformers, and nothing is "
            "imported because a folder names it: import the module before, if you know it"
        )


def read_folder(folder: Path) -> SavedPipeline:
    """Read what a folder's index says; no other file is opened.

    Raises:
        PipelineLookupError: It is no folder of a pipeline, or its index does not say of which class.
    """
    index = folder / _INDEX
    if not os.path.isdir(folder):  # noqa: PTH112  (that of a path raises for what can be no folder's name)
        raise PipelineLookupError(f"cannot load {str(folder)!r}: it is no local folder; download the model first")
    if not index.is_file():
        raise PipelineLookupError(f"cannot load {str(folder)!r}: it has no {_INDEX}, so it is no saved pipeline")
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PipelineLookupError(f"cannot load {str(folder)!r}: its {_INDEX} is no JSON: {error}") from error
    name = content.get("_class_name") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise PipelineLookupError(
            f"cannot load {str(folder)!r}: the '_class_name' in its {_INDEX} must be the name of a class, not {name!r}"
        )
    components = dict(_components(content))
    return SavedPipeline(folder, name, components, {key: value for key, value in content.items() if key not in components})


def _components(index: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, value in index.items():
        if not name.isidentifier() or name.startswith("_") or not isinstance(value, list):
            continue
        match value:
            case [str(library), str(class_name)]:
                yield name, (library, class_name)


def _weight_file(path: Path) -> WeightFile | None:
    stem, *middle, suffix = _SHARD.sub("", path.name).split(".") if "." in path.name else (path.name, "")
    if not path.is_file() or (suffix != _SAFE and suffix not in _PICKLED):
        return None
    return WeightFile(path, stem, ".".join(middle) or None, suffix)


def _files_in(folder: Path) -> list[WeightFile]:
    return [file for path in sorted(folder.iterdir()) if (file := _weight_file(path)) is not None]


def _json_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_connected(folder: Path, cls: Any) -> None:
    """Refuse a folder whose description names another model, which diffusers would load along with it, unlooked at.

    Raises:
        PipelineLookupError: It does.
    """
    readme = folder / "README.md"
    if not getattr(cls, "_load_connected_pipes", False) or not readme.is_file():
        return
    from huggingface_hub import ModelCard  # noqa: PLC0415  (as above)

    if named := getattr(ModelCard.load(readme).data, "prior", None):
        raise PipelineLookupError(
            f"cannot load {str(folder)!r}: its README.md names another model to be loaded with it, {named}: load that one first, and give "
            "its components to from_pretrained(prior_prior=..., ...), from a folder without that line"
        )


def refuse_empty_tokenizers(folder: Path, components: Mapping[str, Any]) -> None:
    """Refuse tokenizers whose vocabulary is not in the folder: transformers makes them all the same, and every prompt is alike to them.

    Args:
        folder: The folder.
        components: What was loaded from it.

    Raises:
        PipelineLookupError: There is one; every one is named.
    """
    empty = [name for name, component in components.items() if _knows_nothing(getattr(component, "tokenizer", component))]
    if empty:
        raise PipelineLookupError(
            f"cannot load {str(folder)!r}: {', '.join(empty)} {'has' if len(empty) == 1 else 'have'} no vocabulary, as its files are not "
            "there: the folder is not complete"
        )


def _knows_nothing(component: Any) -> bool:
    """Whether it is a tokenizer without a token for any letter or digit, but for special ones."""
    known, special = getattr(component, "get_vocab", None), getattr(component, "all_special_tokens", None)
    if not callable(known) or not isinstance(special, list):
        return False
    return not any(letter.isalnum() for token in known().keys() - set(special) for letter in token)
