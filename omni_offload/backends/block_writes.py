"""Methods that write the weights of streamed blocks from outside of the blocks' calls, one block after the other on the device."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from omni_offload.backends.block_ring import BlockRing
from omni_offload.backends.failures import raise_error
from omni_offload.backends.streamed import StreamedResidency
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.residency import ModuleResidency

__all__ = ["writing_blocks"]


class _Written:
    """The block of a ring that is written now; it is on the device until another is, and copied back then."""

    def __init__(self, ring: BlockRing) -> None:
        self._ring = ring
        self._index: int | None = None

    def call(self, index: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a module within a block, with the block on the device."""
        if index != self._index:
            self.leave()
            self._index = index  # first, so that an interrupt is undone
            self._ring.enter(index)
        return method(*args, **kwargs)

    def leave(self) -> None:
        """Copy back what was written. Idempotent."""
        if self._index is not None:
            block = self._ring.blocks[self._index]
            block.mark_written()
            self._ring.leave(self._index, failed=True)  # this is no order to be learned
            self._index = None
            block.validate()  # what was put in the place of a weight is on the device yet


@contextlib.contextmanager
def writing_blocks(residencies: Iterable[ModuleResidency], methods: Sequence[str]) -> Iterator[None]:
    """Return a context in which methods of modules within streamed blocks run with their block on the device.

    The rest of the components is on the device already. What is written, also through `.data`, is kept; on an exception too.

    Args:
        residencies: The components'; for those that do not stream nothing is done.
        methods: Names of methods, on whichever module has them.
    """
    wrapped: list[tuple[torch.nn.Module, str]] = []
    steps: list[tuple[str, Callable[[], None]]] = []
    try:
        for residency in residencies:
            if isinstance(residency, StreamedResidency):
                written = _Written(residency.ring)
                steps.append((f"copy back what was written of {residency.name}", written.leave))
                for module, name, wrapper in _wrappers(residency.ring, written, methods):
                    wrapped.append((module, name))  # first, so that an interrupt is undone
                    module.__dict__[name] = wrapper
        yield
    finally:
        steps += [(f"unwrap {name}", functools.partial(module.__dict__.pop, name, None)) for module, name in wrapped]
        raise_error(run_cleanup_steps(steps))


def _wrappers(ring: BlockRing, written: _Written, methods: Sequence[str]) -> Iterator[tuple[torch.nn.Module, str, Callable[..., Any]]]:
    for index, block in ring.blocks.items():
        for module, name in itertools.product(block.module.modules(), methods):
            own = getattr(module, name, None)
            if callable(own) and name not in module.__dict__:
                yield module, name, functools.update_wrapper(functools.partial(written.call, index, own), own)  # its signature is read
