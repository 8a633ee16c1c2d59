"""What a pipeline class declares about the structure of its components."""

from collections.abc import Mapping

import attrs

from omni_offload.config.checks import raise_problems
from omni_offload.errors import quoted
from omni_offload.protocols import TEXT_ENCODER_COMPONENT

__all__ = ["OffloadPlan", "encoder_kind"]


def _frozen_names(value: object) -> object:
    usable = isinstance(value, list | tuple | set | frozenset) and all(isinstance(item, str) for item in value)
    return frozenset(value) if usable else value  # type: ignore[call-overload]  # it is a collection


def _name_tuples(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {key: tuple(names) if isinstance(names, list | tuple) else names for key, names in value.items()}


def _copied(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


@attrs.frozen(kw_only=True)
class OffloadPlan:
    """Where a pipeline's blocks are; declared by its class as `_offload_plan`. Structure only: it decides nothing.

    Args:
        block_attrs: DiT path -> containers or single blocks in it, in execution order; dotted names.
        encoder_block_attrs: Encoder or VAE path -> streamable stacks in it.
        encoder_component_types: Encoder path -> its kind ("text_encoder"), where its name does not say so.
        offload_submodules: Full path of a large child of a DiT -> its own block container.
        rest_submodules: Full paths of modules inside blocks that stay with the rest of the component.
        resident_dit_paths: DiTs that may hold resident layers; empty: all.
        on_demand_component_paths: Components that have `load_to_device` and `offload_to_cpu`; the pipeline drives them.
        encoder_dlo_weight_replication: Encoders whose weights are equal on all ranks of the gather group.

    Raises:
        OffloadConfigError: A field is of another type, or holds what is no dotted path; the message names each.
    """

    block_attrs: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_name_tuples, hash=False)
    encoder_block_attrs: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_name_tuples, hash=False)
    encoder_component_types: Mapping[str, str] = attrs.field(factory=dict, converter=_copied, hash=False)
    offload_submodules: Mapping[str, str] = attrs.field(factory=dict, converter=_copied, hash=False)
    rest_submodules: frozenset[str] = attrs.field(default=frozenset(), converter=_frozen_names)
    resident_dit_paths: frozenset[str] = attrs.field(default=frozenset(), converter=_frozen_names)
    on_demand_component_paths: frozenset[str] = attrs.field(default=frozenset(), converter=_frozen_names)
    encoder_dlo_weight_replication: frozenset[str] = attrs.field(default=frozenset(), converter=_frozen_names)

    def __attrs_post_init__(self) -> None:
        problems: list[str] = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name.endswith("_attrs"):
                _check_stacks(field.name, value, problems)
            elif field.name in {"encoder_component_types", "offload_submodules"}:
                _check_strings(field.name, value, problems)
            elif not isinstance(value, frozenset) or not all(_is_path(path) for path in value):
                problems.append(f"{field.name} is {quoted(value)}; give a set of dotted paths")
        raise_problems("OffloadPlan", problems)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and all(value.split("."))


def _check_stacks(name: str, value: object, problems: list[str]) -> None:
    if not isinstance(value, Mapping):
        problems.append(f"{name} is {quoted(value)}; give a mapping of path -> tuple of names")
        return
    for path, names in value.items():
        if not _is_path(path):
            problems.append(f"{name} has the key {quoted(path)}; give a dotted path")
        if not isinstance(names, tuple) or not all(_is_path(item) for item in names):
            problems.append(f"{name}[{quoted(path)}] is {quoted(names)}; give a tuple of dotted names, such as ('blocks',)")
        elif len(set(names)) < len(names):
            problems.append(f"{name}[{quoted(path)}] is {quoted(names)}, which names one container twice; name it once")


def _check_strings(name: str, value: object, problems: list[str]) -> None:
    if not isinstance(value, Mapping):
        problems.append(f"{name} is {quoted(value)}; give a mapping of path -> name")
        return
    for path, item in value.items():
        if not _is_path(path) or not _is_path(item):
            problems.append(f"{name} maps {quoted(path)} to {quoted(item)}; give dotted names")
        elif name == "encoder_component_types" and item != TEXT_ENCODER_COMPONENT:
            problems.append(f"{name} maps {quoted(path)} to {quoted(item)}; the one kind of encoder is {TEXT_ENCODER_COMPONENT!r}")


def encoder_kind(name: str, plan: OffloadPlan | None = None) -> str | None:
    """The kind of an encoder.

    Args:
        name: The encoder's path.
        plan: What the pipeline declares about it.

    Returns:
        What the plan says; else "text_encoder" where the last part of the path starts or ends with it; else None: a
        plain encoder, which belongs to no kind.
    """
    declared = None if plan is None else plan.encoder_component_types.get(name)
    if declared is not None:
        return declared
    leaf = name.rpartition(".")[2]
    is_text = leaf.startswith(TEXT_ENCODER_COMPONENT) or leaf.endswith(TEXT_ENCODER_COMPONENT)
    return TEXT_ENCODER_COMPONENT if is_text else None
