"""What is audited: the components of a pipeline, those that stand in no list too, and their blocks."""

from collections.abc import Iterable, Iterator

import attrs
from torch import nn

from omni_offload.discovery import LISTS, WELL_KNOWN, Component, Problems, class_name, find_module, find_unlisted
from omni_offload.plan.topology import Block, blocks_at, declared_stacks
from omni_offload.testing.audit.declared import Declarations

__all__ = ["Part", "find_parts", "likely_kind", "list_name", "loose_parameters"]

_AUTOENCODERS = ("Autoencoder", "VQModel", "Vocoder", "Paella", "VQDiffusion")
_DENOISERS = ("UNet", "Transformer2D", "Transformer3D", "TransformerModel", "ControlNet", "Prior", "DiT", "Adapter", "UVit")


@attrs.frozen(kw_only=True)
class Part:
    """One component.

    Args:
        path: Its path; the first, where it has several.
        names: All its paths.
        kind: "encoder", "dit", "vae" or "resident"; what it most likely is, where it stands in no list.
        module: The module.
        listed: Whether it stands in a list.
        stacks: Declared stacks, or single blocks, by full path, with their blocks.
        rest: Modules in blocks that are declared to stay with the rest.
    """

    path: str
    names: tuple[str, ...]
    kind: str
    module: nn.Module = attrs.field(eq=False, repr=False)
    listed: bool
    stacks: tuple[tuple[str, tuple[Block, ...]], ...] = attrs.field(default=(), eq=False, repr=False)
    rest: tuple[nn.Module, ...] = attrs.field(default=(), eq=False, repr=False)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that may stream; none where there is but one."""
        found = tuple(block for _, stack in self.stacks for block in stack)
        return found if len(found) > 1 else ()

    def names_in(self, path: str) -> str | None:
        """Return the rest of a path that is this component's or leads into it; None for any other."""
        return next((path[len(name) :].removeprefix(".") for name in self.names if f"{path}.".startswith(f"{name}.")), None)


def find_parts(pipeline: object, declared: Declarations) -> tuple[Part, ...]:
    """Find every component that holds weights.

    Raises:
        ComponentPathError: A declared path leads nowhere, or to something else; the message names every one.
    """
    problems = Problems(f"Audit of {class_name(pipeline)}")
    found: dict[int, Part] = {}
    for path, kind in declared.components.items():
        module = find_module(pipeline, path, problems)
        if module is None or not _holds_tensors(module):
            continue
        known = found.get(id(module))
        names = (path,) if known is None else (*known.names, path)
        first = names[0]
        found[id(module)] = Part(path=first, names=names, kind=kind, module=module, listed=True)
    parts = (*found.values(), *_unlisted(pipeline, declared, [part.module for part in found.values()]))
    parts = tuple(_with_stacks(pipeline, part, declared, problems) for part in parts)
    problems.raise_any()
    return parts


def _unlisted(pipeline: object, declared: Declarations, listed: list[nn.Module]) -> Iterator[Part]:
    known = {id(module) for module in listed}
    for path in find_unlisted(pipeline, declared.components, listed):
        module = find_module(pipeline, path, Problems(path))  # none is at the pipeline's own
        if module is not None and not any(id(inner) in known for inner in module.modules()):
            yield Part(path=path, names=(path,), kind=likely_kind(path, module), module=module, listed=False)


def loose_parameters(pipeline: object, declared: Declarations, parts: Iterable[Part]) -> dict[str, str]:
    """Return what holds parameters of its own beside components: no list can name it."""
    found = find_unlisted(pipeline, declared.components, [part.module for part in parts if part.listed])
    known = {part.path for part in parts}
    return {path: text for path, text in found.items() if path not in known}


def _with_stacks(pipeline: object, part: Part, declared: Declarations, problems: Problems) -> Part:
    component = Component(path=part.path, kind=part.kind, module=part.module, aliases=part.names[1:])
    if part.kind == "resident":
        return part
    paths = declared_stacks(component, declared.plan, scan=False, problems=problems)
    rest = (path for path in sorted(declared.plan.rest_submodules) if part.names_in(path) is not None)
    staying = (find_module(pipeline, path, problems) for path in rest)
    return attrs.evolve(
        part,
        stacks=tuple((path, blocks_at(pipeline, path, problems)) for path in paths),
        rest=tuple(module for module in staying if module is not None),
    )


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def likely_kind(path: str, module: nn.Module) -> str:
    """Return the kind that a component which stands in no list most likely is.

    By its class, then by its name: an autoencoder or a vocoder is a "vae", a denoiser (also a prior, a ControlNet, an adapter) a
    "dit", and everything else (text and image encoders, projections, safety checkers) an "encoder".
    """
    name = class_name(module)
    leaf = path.rpartition(".")[2]
    if any(part in name for part in _AUTOENCODERS):
        return "vae"
    if any(part in name for part in _DENOISERS) and not _is_encoder(module):
        return "dit"
    if _is_encoder(module):
        return "encoder"
    return next((kind for kind, names in WELL_KNOWN.items() if leaf in names), "encoder")


def _is_encoder(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "transformers" for base in type(module).__mro__)


def list_name(kind: str) -> str:
    """Return the name of the list of a kind."""
    return next(name for name, listed in LISTS.items() if listed == kind)
