"""Mutants of weights that others own: what FSDP2 has taken, and what is distributed over ranks."""

from mutant import Mutant

__all__ = ["OWNERS"]

_PARALLEL = "tests/backends/test_parallelism.py::"
_PLACES = "tests/selection/test_fsdp.py::test_places_are_known_while_whole_parameters_stand_in_them"

OWNERS = (
    Mutant(
        "fsdp-weights-collected",
        "residency/tables.py",
        "if tensor is not None and not (owner is None and name in owned):",
        "if tensor is not None:",
        "weights that FSDP2 owns are moved to the host",
        (_PLACES,),
    ),
    Mutant(
        "fsdp-weights-are-changes",
        "residency/tables.py",
        "enumerate(map(left_to_fsdp, modules)) if owned]",
        "enumerate(map(left_to_fsdp, modules)) if False]",
        "tables count as changed in every pass, since FSDP2 puts whole weights there",
        (_PLACES,),
    ),
    Mutant(
        "fsdp-shared-places-forgotten",
        "discovery/fsdp.py",
        "            yield from zip(place.shared_modules, place.shared_param_names, strict=True)\n",
        "",
        "a tied weight of FSDP2 is managed at its other places",
        (_PLACES,),
    ),
    Mutant(
        "blocks-of-fsdp-accepted",
        "plan/streamed.py",
        "            if found:\n",
        "            if False:\n",
        "blocks that FSDP2 owns are said to stream",
        (f"{_PARALLEL}test_blocks_that_fsdp_has_taken_are_refused",),
    ),
    Mutant(
        "components-of-fsdp-rotate",
        "plan/streamed.py",
        "        if taken and level:\n",
        "        if False:\n",
        "enable reports success at model level for a component of which nothing is moved",
        (f"{_PARALLEL}test_components_that_fsdp_has_taken_are_refused_at_model_level",),
    ),
    Mutant(
        "spread-blocks-accepted",
        "backends/spread.py",
        "if not ranks <= allowed]",
        "if False]",
        "ranks gather weights of which each holds another part",
        (f"{_PARALLEL}test_blocks_distributed_over_others_than_tensor_parallel_ranks_are_refused",),
    ),
    Mutant(
        "replicated-weights-refused",
        "backends/spread.py",
        " if not placement.is_replicate()]",
        "]",
        "a weight that is equal on data-parallel ranks is refused",
        (f"{_PARALLEL}test_blocks_distributed_over_others_than_tensor_parallel_ranks_are_refused",),
    ),
)
