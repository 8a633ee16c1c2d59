"""Every read of a weight, seen at the operators: those that no declaration covers.

Weights stay where they are, so that a run goes on after a finding. What decides is what an accelerator would have seen: outside of a
component's use its weights are on the host, with real values. An operator on them alone runs there, and so may what follows, until a
copy to a device is asked for; one that brings them together with other tensors is the fault.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from omni_offload.testing.audit.activity import Activity
from omni_offload.testing.audit.places import Place, is_maintenance, place, transferred
from omni_offload.testing.audit.weights import Weight, Weights, storage_of

__all__ = ["Reads", "StrayRead"]

_MAKES = ("empty", "zeros", "ones", "full", "rand", "is_same_size", "sym_", "_has_compatible")
_MAKES_LIKE = ("new_", "_like")


@attrs.frozen(eq=False)
class StrayRead:
    """A weight that was read while it was away.

    Attributes:
        weight: The weight.
        of_block: Whether its component was active, and only its block was not.
        place: Where.
    """

    weight: Weight
    of_block: bool
    place: Place


class Reads:
    """Watches a call.

    Attributes:
        stray: The reads that no declaration covers, in their order; the first of each weight.
        on_host: The weights that were read on the host only.

    Args:
        pipeline: Whose call it is.
        weights: Its weights.
    """

    def __init__(self, pipeline: object, weights: Weights) -> None:
        self.activity: Activity | None = None
        self.stray: dict[tuple[str, bool], StrayRead] = {}
        self.on_host: dict[str, StrayRead] = {}
        self._pipeline = pipeline
        self._weights = weights
        self._host: dict[int, tuple[torch.Tensor, tuple[StrayRead, ...]]] = {}
        self._suspended = False
        self._cast = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the operators of this thread while the body runs."""
        with _Transfers(self), _Operators(self):
            yield

    def away(self, tensor: torch.Tensor) -> tuple[StrayRead, ...]:
        """Return the reads that a read of a tensor now would be; none where its weights are there, and where it is no weight."""
        found = self._host.get(storage_of(tensor))
        return found[1] if found is not None else tuple(self._stray(self._weights.at(tensor), note=False))

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is after a copy to the device: another, where its weights are away."""
        reads = self.away(tensor)
        if not reads or is_maintenance():
            return tensor
        self._note_host(reads)
        with self.suspended():
            return tensor.detach().clone()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Look at no operator while the body runs."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def _stray(self, weights: tuple[Weight, ...], *, note: bool) -> Iterator[StrayRead]:
        """Yield a read for the first owner of weights that are away: of a component, and of a block."""
        if not weights or self.activity is None:
            return
        here = [weight for weight in weights if self.activity.has_component(weight)]
        running = [weight for weight in weights if self.activity.has_block(weight)]
        where: Place | None = None
        for of_block, found in ((False, here), (True, running)):
            if found:
                if note and not of_block:
                    for weight in found:
                        self.activity.note_read(weight)
                continue
            where = where or place(self._pipeline)
            yield StrayRead(weights[0], of_block, where)

    def look(self, func: Any, inputs: list[torch.Tensor], result: Any) -> None:
        """Look at an operator that has run."""
        if self._suspended or _reads_nothing(func):
            return
        if self._cast and not is_maintenance():
            self._cast = False
            self._weights.renew_all()
        made = {storage_of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        reads: dict[int, tuple[StrayRead, ...]] = {}
        others = False
        for tensor in inputs:
            address = storage_of(tensor)
            found = self._host.get(address)
            strays = found[1] if found is not None else tuple(self._stray(self._weights.at(tensor), note=address not in made))
            if strays and address not in made:  # else it is a view, or was written
                reads[id(tensor)] = strays
            elif not strays:
                others = others or tensor.dim() > 0
        if not reads:
            return
        if is_maintenance():
            self._cast = True
            return
        strays = tuple(read for found in reads.values() for read in found)
        if others and func.overloadpacket.__name__ != "copy_":  # which goes from device to device
            for read in strays:
                self.stray.setdefault((read.weight.name, read.of_block), read)
        else:
            self._stay_on_host(strays, result)

    def _stay_on_host(self, reads: tuple[StrayRead, ...], result: Any) -> None:
        self._note_host(reads)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() and (address := storage_of(leaf)):  # 0: of all that have no storage
                self._host[address] = leaf, reads

    def _note_host(self, reads: tuple[StrayRead, ...]) -> None:
        for read in reads:
            self.on_host.setdefault(read.weight.name, read)


def _reads_nothing(func: Any) -> bool:
    """Whether an operator looks at the form of its inputs only."""
    name: str = func.overloadpacket.__name__
    return name.startswith(_MAKES) or any(part in name for part in _MAKES_LIKE)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Shows every operator to the reads."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._reads = reads

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(leaf, torch.Tensor)]
        self._reads.look(func, inputs, result)
        return result


class _Transfers(TorchFunctionMode):
    """Takes a tensor that is brought to a device by name for another one, as it is where there is an accelerator."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    @override
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and transferred(func, args, kwargs):
            return func(self._reads.bring(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)
