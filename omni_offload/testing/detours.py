"""Blocks that run otherwise than their model runs them: left out, twice, in each other's place, beside others, or not to the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omni_offload.testing.observe import Target, tensors_in, watching

__all__ = ["Detours"]

#: Of all uses of blocks: how many are left out, end the pass, are done twice, or have another block run before; the others go on.
_LEFT_OUT, _END, _TWICE, _BESIDE = 0.2, 0.25, 0.4, 0.6


class _EndOfPassError(Exception):
    """The rest of a pass is left out."""


class Detours:
    """Lets a pipeline take detours, drawn by chance: two of one seed take the same ones, so that their outputs are the same.

    Blocks of one form run in each other's place, in reverse order. For a block that is left out its last result stands in, and
    for a component whose pass was ended, its last result.

    Args:
        bench: The bench; it must have been prepared.
        pipeline: The pipeline, as it is wrapped: enabled, or resident.

    Attributes:
        beside: Sums of what blocks returned that ran beside others.
        taken: How many detours were taken.
    """

    def __init__(self, bench: Any, pipeline: Any) -> None:
        self._random = bench.random()
        self._blocks: list[Target] = bench.blocks(pipeline)
        owners = dict.fromkeys(bench.component_of(pipeline, block.path) for block in self._blocks)
        self._owners = [Target(path, bench.components(pipeline)[path], "forward") for path in owners]
        self._owner_of = {block.path: next(path for path in owners if f"{block.path}.".startswith(f"{path}.")) for block in self._blocks}
        self._stands_in = _reversed(self._blocks)
        self._methods: dict[str, Callable[..., Any]] = {}
        self._given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._results: dict[str, Any] = {}
        self.beside: list[float] = []
        self.taken = 0

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take detours in the body; what is kept of the blocks' results is dropped at its end."""
        self._methods = {block.path: block.module.forward for block in self._blocks}
        owners = {owner.path for owner in self._owners}

        def around(target: Target, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self._pass if target.path in owners else self._block
            return run(target.path, method, args, kwargs)

        try:
            with watching([*self._owners, *self._blocks], around):
                yield
        finally:
            for table in (self._methods, self._given, self._results):
                table.clear()

    def _pass(self, path: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self._results[path] = method(*args, **kwargs)
        except _EndOfPassError:
            self.taken += 1
        return self._results[path]

    def _block(self, path: str, _method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        chance = self._random.random()
        seen = path in self._given and _shapes(self._given[path]) == _shapes((args, kwargs))
        if chance < _LEFT_OUT and seen:
            self.taken += 1
            return self._results[path]
        if _LEFT_OUT <= chance < _END and self._owner_of[path] in self._results:
            raise _EndOfPassError
        method = self._methods[self._stands_in[path]]
        if _END <= chance < _TWICE:
            self._run_beside(method, args, kwargs)
        if _TWICE <= chance < _BESIDE and self._given:
            other = self._random.choice(sorted(self._given))
            self._run_beside(self._methods[other], *self._given[other])
        self._given[path] = args, kwargs
        self._results[path] = method(*args, **kwargs)
        return self._results[path]

    def _run_beside(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.taken += 1
        self.beside += [float(tensor.double().sum()) for tensor in tensors_in(method(*args, **kwargs))]


def _reversed(blocks: list[Target]) -> dict[str, str]:
    """Return for each block the one that runs in its place."""
    forms: dict[Any, list[str]] = {}
    for block in blocks:
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in block.module.named_parameters())
        forms.setdefault((type(block.module), shapes), []).append(block.path)
    return {path: other for paths in forms.values() for path, other in zip(paths, reversed(paths), strict=True)}


def _shapes(given: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in(given)]
