"""The components of a pipeline: declared as dotted paths, or found by well-known names."""

from omni_offload.discovery.components import (
    WELL_KNOWN,
    Component,
    discover_components,
    find_components,
    find_unlisted,
    refuse_meta,
)
from omni_offload.discovery.declarations import (
    LISTS,
    declared_co_residents,
    declared_entry_points,
    declared_lists,
    validate_declarations,
)
from omni_offload.discovery.entry_points import EntryPoint, find_entry_points, resolve_entry_points
from omni_offload.discovery.fsdp import flat_fsdp_modules, fsdp_parameters, left_to_fsdp, look_for_fsdp, managed_weights_of
from omni_offload.discovery.paths import all_components, find_module, is_path, module_at, modules_in, modules_outside
from omni_offload.discovery.problems import Problems, class_name, nearest
from omni_offload.discovery.walk import modules_of, named_modules_of, weights_of

__all__ = [
    "LISTS",
    "WELL_KNOWN",
    "Component",
    "EntryPoint",
    "Problems",
    "all_components",
    "class_name",
    "declared_co_residents",
    "declared_entry_points",
    "declared_lists",
    "discover_components",
    "find_components",
    "find_entry_points",
    "find_module",
    "find_unlisted",
    "flat_fsdp_modules",
    "fsdp_parameters",
    "is_path",
    "left_to_fsdp",
    "look_for_fsdp",
    "managed_weights_of",
    "module_at",
    "modules_in",
    "modules_of",
    "modules_outside",
    "named_modules_of",
    "nearest",
    "refuse_meta",
    "resolve_entry_points",
    "validate_declarations",
    "weights_of",
]
