"""The hooks around the blocks of a streamed component."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from omni_offload.backends.entry import EntryHook, is_use
from omni_offload.backends.owners import Member
from omni_offload.backends.rotation import Rotation
from omni_offload.backends.streamed import StreamedResidency

__all__ = ["BlockHook", "block_hooks"]


class BlockHook(EntryHook):
    """Around `forward` of one block: its weights are on the device while it runs.

    Called outside of its component's activation, it makes one: the rest of the component comes along.
    """

    def __init__(self, rotation: Rotation, member: Member, residency: StreamedResidency, index: int) -> None:
        super().__init__(rotation, member)
        self._ring = residency.ring
        self._index = index
        self._uses = threading.local()

    @property
    def _entered(self) -> list[bool | None]:
        """Per running method in this thread, whether it made the component's activation; None: nothing was done for it."""
        entered: list[bool | None] = self._uses.__dict__.setdefault("entered", [])
        return entered

    @override
    def pre_forward(
        self, module: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._entered.append(None)
        if not is_use(module, method):
            return args, kwargs
        thread = threading.get_ident()
        outside = all(activation.thread != thread for activation in self._member.owner.active)
        self._entered[-1] = outside
        if outside:
            args, kwargs = super().pre_forward(module, method, args, kwargs)
        if self._index in self._ring.blocks:  # else it is a resident one, for now
            self._ring.enter(self._index)
        else:
            self._ring.pass_by(self._index)
        return args, kwargs

    @override
    def post_forward(self, module: torch.nn.Module, method: str, output: Any) -> Any:
        outside = self._entered[-1]
        if outside is not None and self._index in self._ring.blocks:
            self._ring.leave(self._index)
        if outside:
            output = super().post_forward(module, method, output)
        self._entered.pop()  # last: what fails before is left by `on_error`
        return output

    @override
    def on_error(self, module: torch.nn.Module, method: str, error: BaseException) -> None:
        outside = (self._entered or [None])[-1]  # an interrupt may have come before the entry was noted
        try:
            if outside is not None and self._index in self._ring.blocks:
                self._rotation.note_failure(error, self._ring.blocks[self._index])
                self._ring.leave(self._index, failed=True)
        finally:
            del self._entered[-1:]
            if outside:
                super().on_error(module, method, error)


def block_hooks(rotation: Rotation, member: Member) -> Iterator[tuple[str, torch.nn.Module, BlockHook]]:
    """Yield path, module and hook of every block of a component that streams, of its residents too: they may change."""
    residency = member.owner.residency
    if isinstance(residency, StreamedResidency):
        for block in residency.blocks:
            yield block.name, block.module, BlockHook(rotation, member, residency, block.index)
