"""Masters in mapped files: a tensor whose bytes are those of its checkpoint need not have memory of its own in every process."""

import importlib.metadata
import itertools
import mmap
import os
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import torch

from omni_offload.accelerator import Accelerator, Registration
from omni_offload.discovery import named_modules_of
from omni_offload.errors import OffloadConfigError
from omni_offload.residency.checkpoint import SavedTensor, read_tensors
from omni_offload.residency.tensors import Placement

__all__ = ["Checkpoint", "MappedFile"]

#: The safetensors that puts a new file in the place of the one that it saves over; those before (0.7 and 0.4 were tried) write into it.
_SAVES_BESIDE = (0, 8)

_Stamp = tuple[int, int]
_Place = tuple["MappedFile", int]


class MappedFile:
    """A file whose pages all processes of a node share, until one of them writes to a page: then that page is the process's own.

    Attributes:
        path: The file.
        nbytes: Its size.
        raw: Its bytes, uint8.
        kept: Whether weights stay in it when their management ends.

    Args:
        path: As the attribute.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = False
        descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, descriptor)  # open as long as it is looked whether the file was changed
        self._descriptor = descriptor
        self._stamp = self._read_stamp()
        self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        self.nbytes = len(self._memory)
        self.raw = self.slice(0, self.nbytes)
        self._locked: dict[tuple[int, int], Registration] = {}

    def slice(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes `[offset, offset + nbytes)` as a uint8 tensor; its storage is exactly that range."""
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunction():  # noqa: SLF001  (a default device must not move it)
            return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)

    @property
    def changed(self) -> bool:
        """Whether the file was written to in place since it was mapped: its bytes may be others. Another in its place does not count."""
        return self._close.alive and self._read_stamp() != self._stamp

    def _read_stamp(self) -> _Stamp:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def close(self) -> None:
        """Unlock its pages and look at the file no more; tensors in it stay valid. Idempotent."""
        self.unlock()
        self._close()

    # ---- page locking ------------------------------------------------------------------------------------------------------

    def lock(self, accelerator: Accelerator, *, limit: int, chunk: int) -> None:
        """Lock pages from the first on, chunk by chunk.

        Args:
            accelerator: The device that will copy from them.
            limit: Most bytes.
            chunk: Bytes of a chunk, whole pages.

        Raises:
            RuntimeError: The device refused a chunk; those before it are locked.
        """
        for start in range(0, self.nbytes, chunk):
            end = min(start + chunk, self.nbytes)
            if self.locked_bytes + end - start > limit:
                return
            if (start, end) not in self._locked:
                address = self.raw.data_ptr() + start
                self._locked[start, end] = Registration(accelerator, address, end - start, self._memory)

    @property
    def locked_bytes(self) -> int:
        """How many bytes are locked."""
        return sum(end - start for start, end in self._locked)

    def is_locked(self, start: int, nbytes: int) -> bool:
        """Whether bytes `[start, start + nbytes)` are all locked."""
        return all(locked for _, _, locked in self.pieces(start, nbytes))

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, int, bool]]:
        """Yield where in bytes `[start, start + nbytes)` what is copied as one begins and ends, from `start`, and whether it is locked.

        A copy from two registrations in one is an error on some devices.
        """
        at, stop = start, start + nbytes
        for _, end in sorted(self._locked):  # from the first page on, without a gap
            if at < min(end, stop):
                yield at - start, min(end, stop) - start, True
                at = min(end, stop)
        if at < stop:
            yield at - start, nbytes, False

    def unlock(self) -> None:
        """Unlock its pages; blocks the host until queued copies are done. Idempotent."""
        for part, registration in [*self._locked.items()]:
            registration.end()
            del self._locked[part]


@attrs.define(eq=False)
class Checkpoint:
    """The files that a component's weights stand in.

    Attributes:
        name: Its path.
        component: The component.
        files: Its files.
        required: Whether files that cannot be read are an error: they were asked for.
        mapped: Those that weights lie in.
    """

    name: str
    component: torch.nn.Module
    files: Iterable[Path]
    required: bool
    mapped: dict[Path, MappedFile] = attrs.field(factory=dict, init=False)
    _saved: dict[str, list[SavedTensor]] = attrs.field(factory=dict, init=False)
    _endings: dict[tuple[str, ...], list[tuple[list[str], list[SavedTensor]]]] = attrs.field(factory=dict, init=False)
    _problems: list[str] = attrs.field(factory=list, init=False)
    _names: Mapping[int, list[str]] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if problem := _writer_problem():
            self._problems.append(problem)
            if self.required:
                raise OffloadConfigError(f"component {self.name!r} was to stream from a checkpoint, and {problem}")
        for file in () if problem else self.files:
            try:
                for name, saved in read_tensors(file):
                    self._saved.setdefault(name, []).append(saved)
            except OffloadConfigError as error:
                if self.required:
                    raise
                self._problems.append(str(error))
        for name, tensors in self._saved.items():
            parts = name.split(".")
            for ending in {tuple(parts[-2:]), tuple(parts[-1:])}:
                self._endings.setdefault(ending, []).append((parts, tensors))

    def look_again(self) -> None:
        """Take in which tensors the component has now, for `find`."""
        self._names = _names_in(self.component)

    def find(self, placement: Placement, raw: torch.Tensor, taken: Collection[_Place]) -> _Place | str:
        """Return where the bytes of some tensors stand in a file, all of them compared; or why nowhere.

        Args:
            placement: The tensors.
            raw: Their bytes, on the host.
            taken: Places where other tensors lie: what is written to these must not be seen in those.
        """
        pairs = zip(placement.entries, placement.offsets, strict=True)
        whole = [e.tensor for e, at in pairs if at == 0 and e.tensor.nbytes == placement.nbytes and e.tensor.is_contiguous()]
        if not whole:
            return "not one contiguous tensor"
        reason = "not in the file"
        for tensor in whole:
            for saved in self._candidates(tensor):
                if not saved.is_like(tensor):
                    reason = "of another type or shape in the file"
                elif saved.start % tensor.itemsize:
                    reason = "not aligned in the file"
                else:
                    found = self._compare(raw, saved, taken)
                    if not isinstance(found, str):
                        return found
                    reason = found
        return "; ".join(self._problems) or reason

    def _compare(self, raw: torch.Tensor, saved: SavedTensor, taken: Collection[_Place]) -> _Place | str:
        try:
            file = self._map(saved.file)
            there = file.slice(saved.start, saved.nbytes)
        except (OSError, ValueError) as error:  # it was removed or cut short since its header was read
            return f"the file could not be mapped ({error})"
        if there.data_ptr() == raw.data_ptr():
            return file, saved.start
        if not torch.equal(raw, there):
            return "other values than the file's"
        return "in the file once for several tensors" if (file, saved.start) in taken else (file, saved.start)

    def _candidates(self, tensor: torch.Tensor) -> Iterator[SavedTensor]:
        """Yield the tensors of the file that may be one: of a name of it; else those like it whose names end most like one of it.

        Libraries rename what is saved, above the modules with weights. Values decide.
        """
        names = self._names.get(id(tensor), [])
        same = [saved for name in names for saved in self._saved.get(name, ())]
        if same:
            yield from same
            return
        found: dict[int, list[SavedTensor]] = {}
        for name in names:
            parts = name.split(".")
            for key, saved in self._endings.get(tuple(parts[-2:]), ()):
                alike = sum(1 for _ in itertools.takewhile(_are_equal, zip(parts[::-1], key[::-1], strict=False)))
                for one in saved:
                    if one.is_like(tensor):
                        found.setdefault(alike, []).append(one)
        yield from found.get(max(found, default=0), ())

    def _map(self, path: Path) -> MappedFile:
        if path not in self.mapped:
            self.mapped[path] = MappedFile(path)
        return self.mapped[path]

    def changes(self) -> Iterator[str]:
        """Yield which file was written to while it is mapped."""
        for path, file in self.mapped.items():
            if file.changed:
                yield f"{path} was written to while weights of component {self.name!r} were mapped from it"

    def close(self) -> None:
        """Unlock all pages, and look at the files no more. Idempotent."""
        for file in self.mapped.values():
            file.close()


def _writer_problem() -> str:
    """Say why no file may be mapped: what saves into it would write to the weights of all processes, or end them all (`SIGBUS`)."""
    try:
        found = importlib.metadata.version("safetensors")
    except importlib.metadata.PackageNotFoundError:
        return ""
    if tuple(map(int, re.findall(r"\d+", found)[:2])) >= _SAVES_BESIDE:  # also of a release candidate
        return ""
    return f"safetensors {found} writes into the file that it saves over; install {'.'.join(map(str, _SAVES_BESIDE))} or later"


def _are_equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _names_in(component: torch.nn.Module) -> Mapping[int, list[str]]:
    """Return the names that a component's `state_dict` has for tensors, by their ids; a tied one has several."""
    names: dict[int, list[str]] = {}
    for path, module in named_modules_of(component):
        state = module.__dict__
        lasting = {name: tensor for name, tensor in state["_buffers"].items() if name not in state["_non_persistent_buffers_set"]}
        for name, tensor in {**state["_parameters"], **lasting}.items():
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    return names
