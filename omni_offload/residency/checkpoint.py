"""Which tensors a checkpoint of safetensors holds, and where in its files; and the files that a module was loaded from."""

import json
import math
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from omni_offload.errors import OffloadConfigError, quoted

__all__ = ["SavedTensor", "files_of", "loaded_from", "read_tensors", "remember_files"]

#: The types of the format by their names; https://huggingface.co/docs/safetensors.
_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_SUFFIX = ".safetensors"
_LENGTH_BYTES = 8
#: Most bytes of a header, as the format says.
_MOST_HEADER_BYTES = 100_000_000

_LOADED_FROM: MutableMapping[Any, tuple[Path, ...]] = WeakIdKeyDictionary()


def remember_files(module: torch.nn.Module, files: Iterable[Path]) -> None:
    """Remember the safetensors that a module was loaded from, as long as it lives. A copy of it knows nothing of them."""
    _LOADED_FROM[module] = tuple(file.absolute() for file in files)


def loaded_from(module: torch.nn.Module) -> tuple[Path, ...]:
    """Return the safetensors that a module was loaded from, as far as that was remembered."""
    return _LOADED_FROM.get(module, ())


@attrs.frozen
class SavedTensor:
    """One tensor of a file.

    Attributes:
        file: The file.
        kind: Its type, as the file names it.
        shape: Its shape; it is contiguous.
        start: Where in the file its first byte is.
        nbytes: How many bytes it has.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether it has a tensor's type and shape."""
        return _TYPES.get(self.kind) is tensor.dtype and self.shape == tuple(tensor.shape)


def files_of(path: Path, component: str) -> list[Path]:
    """Return the files of a checkpoint.

    Args:
        path: A file; an index, `*.safetensors.index.json`; a folder with safetensors; or that of a pipeline, with a folder of the
            component's name.
        component: The component.

    Raises:
        OffloadConfigError: It is none of these, or not complete.
    """
    asked = f"component {component!r} was to stream from checkpoint {quoted(str(path))}"
    if path.is_dir():
        folder = path / component if (path / component).is_dir() else path
        found = sorted(folder.glob(f"*{_SUFFIX}"))
        if not found:
            raise OffloadConfigError(f"{asked}, a folder without {_SUFFIX[1:]}; name one that has some")
        return found
    if not path.is_file():
        raise OffloadConfigError(f"{asked}, which is not there; name a file, an index or a folder of safetensors")
    if path.suffix == ".json":
        return _shards(path, asked)
    if path.suffix != _SUFFIX:
        raise OffloadConfigError(f"{asked}, which is no {_SUFFIX[1:]}; pickled weights cannot be mapped: convert them with save_pretrained")
    return [path]


def _shards(index: Path, asked: str) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        shards = [index.parent / Path(name).name for name in names]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OffloadConfigError(f"{asked}, which is no index with a weight_map ({type(error).__name__}: {error})") from error
    missing = [name for name, shard in zip(names, shards, strict=True) if not (shard.is_file() and name == shard.name)]
    if missing:
        raise OffloadConfigError(f"{asked}, which names {', '.join(missing)}: not there beside it")
    return shards


def read_tensors(file: Path) -> Iterator[tuple[str, SavedTensor]]:
    """Yield the name of every tensor in a file of safetensors, and where it is; only the header is read.

    Raises:
        OffloadConfigError: It cannot be read, or is no such file.
    """
    try:
        header, first, size = _read_header(file)
        tensors = [(name, _saved(file, fields, first, size)) for name, fields in header.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OffloadConfigError(f"{quoted(str(file))} cannot be read as safetensors ({type(error).__name__}: {error})") from error
    yield from tensors


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, where the bytes after it begin, and the size of the file."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ValueError(f"its header would have {length} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
    return header, _LENGTH_BYTES + length, size


def _saved(file: Path, fields: Any, first: int, size: int) -> SavedTensor:
    kind, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    itemsize = _TYPES[kind].itemsize if kind in _TYPES else None
    if not 0 <= begin <= end <= size - first or (itemsize and math.prod(shape) * itemsize != end - begin):
        raise ValueError(f"bytes {begin} to {end} for a {kind} of shape {list(shape)}, in a file of {size} bytes")
    return SavedTensor(file, kind, shape, first + begin, end - begin)
