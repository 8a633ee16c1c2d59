"""Which components and blocks are active, told from the declarations: nothing has to be enabled."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from omni_offload.discovery import module_at
from omni_offload.hooks import HookRegistry, ModelHook
from omni_offload.testing.audit.declared import Declarations, Item
from omni_offload.testing.audit.parts import Part
from omni_offload.testing.audit.weights import Weight
from omni_offload.wrappers import DISPATCH

__all__ = ["Activity", "declared_use"]

_HOOK = "omni_offload.audit"
_FORWARD = Item("forward", "")
_CONTEXT = Item("on_device", "")


class Activity:
    """What is active now.

    Attributes:
        uses: The components in the order in which their uses began.
        needed: What is declared, and without it some weight would have been read too early or too late.

    Args:
        begin: Called with a component when its use begins, and when it has ended.
        aligned: What brings the inputs of an entry to the device.
    """

    def __init__(self, begin: Callable[[Part], None], aligned: Callable[[Any], Any]) -> None:
        self.uses: list[str] = []
        self.needed: set[Item] = set()
        self.aligned = aligned
        self._changed = begin
        self._components: dict[str, list[Item]] = {}
        self._blocks: list[str] = []

    def enter(self, part: Part, by: Item) -> None:
        """Begin the use of a component."""
        active = self._components.setdefault(part.path, [])
        active.append(by)
        if len(active) == 1:
            self.uses.append(part.path)
            self._changed(part)

    def leave(self, part: Part) -> None:
        """End it."""
        active = self._components[part.path]
        active.pop()
        if not active:
            self._changed(part)

    def enter_block(self, path: str) -> None:
        """Begin the run of a block."""
        self._blocks.append(path)

    def leave_block(self) -> None:
        """End it."""
        self._blocks.pop()

    def has_component(self, weight: Weight) -> bool:
        """Whether a weight's component is on the device."""
        return weight.part.kind == "resident" or bool(self._components.get(weight.part.path))

    def has_block(self, weight: Weight) -> bool:
        """Whether a weight is the rest's, or its block runs."""
        return weight.block is None or weight.block in self._blocks

    def note_read(self, weight: Weight) -> None:
        """Note a read that is covered: where one entry point alone covers it, that one is needed."""
        by = set(self._components.get(weight.part.path, ()))
        if len(by) == 1:
            self.needed |= by


class _Use(ModelHook):
    """Around the methods of one module that count as work of one component."""

    def __init__(self, activity: Activity, part: Part, path: str, *, root: bool) -> None:
        self._activity = activity
        self._part = part
        self._path = path
        self._root = root

    @override
    def pre_forward(
        self, module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        method = "forward" if method == DISPATCH else method
        args, kwargs = self._activity.aligned((args, kwargs))
        by = _FORWARD if self._root and method == "forward" else Item("entry point", self._path, method)
        self._activity.enter(self._part, by)
        return args, kwargs

    @override
    def post_forward(self, module: nn.Module, method: str, output: Any) -> Any:
        self._activity.leave(self._part)
        return output

    @override
    def on_error(self, module: nn.Module, method: str, error: BaseException) -> None:
        self._activity.leave(self._part)


class _Run(ModelHook):
    """Around the forward of one block."""

    def __init__(self, activity: Activity, path: str) -> None:
        self._activity = activity
        self._path = path

    @override
    def pre_forward(
        self, module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._activity.enter_block(self._path)
        return args, kwargs

    @override
    def post_forward(self, module: nn.Module, method: str, output: Any) -> Any:
        self._activity.leave_block()
        return output

    @override
    def on_error(self, module: nn.Module, method: str, error: BaseException) -> None:
        self._activity.leave_block()


@contextlib.contextmanager
def declared_use(pipeline: Any, parts: tuple[Part, ...], declared: Declarations, activity: Activity) -> Iterator[None]:
    """Have the activity follow every entry point, block and `on_device` of a pipeline while the body runs.

    The pipeline is as before when the body ends, also by an exception.

    Raises:
        ComponentPathError: An entry point lies in no module.
        OffloadStateError: An entry point is no method, or one that returns before its work is done.
    """
    with contextlib.ExitStack() as stack:
        for part in parts:
            for path, (module, methods) in _entry_modules(pipeline, part, declared.entry_points).items():
                _register(module, f"use of {path}", _Use(activity, part, path, root=module is part.module), methods, stack)
            for path, block in part.blocks:
                _register(block, f"run of {path}", _Run(activity, path), ["forward"], stack)
        stack.enter_context(_on_device(pipeline, parts, activity))
        yield


def _entry_modules(pipeline: object, part: Part, declared: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[nn.Module, list[str]]]:
    found: dict[str, tuple[nn.Module, list[str]]] = {part.path: (part.module, ["forward"])}
    for path, methods in declared.items():
        if path and part.names_in(path) is not None:
            found.setdefault(path, (module_at(pipeline, path), []))[1].extend(methods)
    return found


def _register(module: nn.Module, name: str, hook: ModelHook, methods: list[str], stack: contextlib.ExitStack) -> None:
    name = f"{_HOOK} {id(hook):x} {name}"
    dispatch = [DISPATCH] if "forward" in methods else []
    registry = HookRegistry.get_or_create(module)
    stack.callback(lambda: registry.remove_hook(name))
    registry.register_hook(name, hook, tuple(dict.fromkeys([*methods, *dispatch])))


@contextlib.contextmanager
def _on_device(pipeline: Any, parts: tuple[Part, ...], activity: Activity) -> Iterator[None]:
    """Take `on_device` for a use, as enabled offload would."""
    if not hasattr(pipeline, "on_device"):
        yield
        return

    @contextlib.contextmanager
    def on_device(*components: str) -> Iterator[None]:
        used = [part for part in parts if set(part.names) & set(components)]
        for part in used:
            activity.enter(part, _CONTEXT)
        try:
            yield
        finally:
            for part in used:
                activity.leave(part)

    vars(pipeline)["on_device"] = on_device
    try:
        yield
    finally:
        vars(pipeline).pop("on_device", None)


def aligned(value: Any, bring: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return arguments with every tensor in containers brought to the device; the containers as they are where none has to move."""
    leaves, spec = pytree.tree_flatten(value)
    moved = [bring(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if all(new is old for new, old in zip(moved, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(moved, spec)
