"""How ranks are laid out, as far as offload must know."""

import math

import attrs

from omni_offload.config.checks import check_bool, check_int, raise_problems
from omni_offload.errors import OffloadConfigError, quoted
from omni_offload.refusals import HSDP_BESIDE_OTHERS, OTHER_WORLD

__all__ = [
    "DiffusionParallelConfig",
    "derive_dp_size",
    "gather_axis",
    "parallel_problems",
    "rank_layout",
    "read_parallel",
]

_SIZES = ("data_parallel_size", "sequence_parallel_size", "tensor_parallel_size", "hsdp_replicate_size")


@attrs.frozen(kw_only=True)
class DiffusionParallelConfig:
    """The sizes of the parallel axes.

    Args:
        data_parallel_size: Ranks that hold the same weights and compute other samples.
        sequence_parallel_size: Ranks that hold the same weights and compute other parts of a sequence.
        tensor_parallel_size: Ranks that hold different parts of every weight.
        use_hsdp: Whether parameters are sharded by HSDP.
        hsdp_shard_size: Ranks that share one copy of the weights; -1: as many as the world leaves.
        hsdp_replicate_size: Copies of the weights.

    Raises:
        OffloadConfigError: A size is not an int of its range, or `use_hsdp` is not a bool.
    """

    data_parallel_size: int = 1
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    use_hsdp: bool = False
    hsdp_shard_size: int = -1
    hsdp_replicate_size: int = 1

    def __attrs_post_init__(self) -> None:
        problems: list[str] = []
        fields = _read(self, problems)
        raise_problems("DiffusionParallelConfig", problems)
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # the defaults, where None was given


def _read(source: object, problems: list[str]) -> dict[str, int | bool]:
    fields: dict[str, int | bool] = {}
    for name in _SIZES:
        fields[name] = check_int(f"parallel_config.{name}", getattr(source, name, None), problems, minimum=1) or 1
    shard = getattr(source, "hsdp_shard_size", None)
    if shard != -1 or isinstance(shard, bool):
        shard = check_int("parallel_config.hsdp_shard_size (-1: what the world leaves)", shard, problems, minimum=1)
    fields["hsdp_shard_size"] = shard or -1
    hsdp = getattr(source, "use_hsdp", None)
    fields["use_hsdp"] = check_bool("parallel_config.use_hsdp", hsdp, problems, default=False)
    return fields


def read_parallel(source: object, problems: list[str]) -> DiffusionParallelConfig:
    """Read any object with the attributes of `DiffusionParallelConfig`; a missing one (or None) takes its default."""
    if isinstance(source, DiffusionParallelConfig):
        return source
    known = [field.name for field in attrs.fields(DiffusionParallelConfig)]
    if source is not None and not any(hasattr(source, name) for name in known):
        problems.append(f"parallel_config is {quoted(source)}; give an object with attributes such as {', '.join(known)}")
        return DiffusionParallelConfig()
    found: list[str] = []
    fields = _read(source, found)
    problems.extend(found)
    return DiffusionParallelConfig() if found else DiffusionParallelConfig(**fields)  # type: ignore[arg-type]  # by name


def parallel_problems(parallel: DiffusionParallelConfig) -> list[str]:
    """What no world can serve: HSDP beside sequence or tensor parallelism."""
    others = {name: getattr(parallel, name) for name in ("sequence_parallel_size", "tensor_parallel_size")}
    return [
        HSDP_BESIDE_OTHERS.of(f"parallel_config has use_hsdp with {name}={size}")
        for name, size in others.items()
        if parallel.use_hsdp and size != 1
    ]


def derive_dp_size(parallel: DiffusionParallelConfig) -> int:
    """HSDP's shard x replicate where both are given, else the data-parallel size; where that is 1, sequence parallel."""
    if parallel.use_hsdp and parallel.hsdp_shard_size > 0:
        size = parallel.hsdp_shard_size * parallel.hsdp_replicate_size
    else:
        size = parallel.data_parallel_size
    return size if size != 1 else parallel.sequence_parallel_size


def rank_layout(parallel: DiffusionParallelConfig, *, world_size: int) -> tuple[tuple[str, int], ...]:
    """The axes of the world and their sizes, slowest first (ranks are row-major over them).

    Args:
        parallel: The sizes that were asked for.
        world_size: Ranks in the world.

    Returns:
        `(("replicate", r), ("shard", s))` with HSDP, else `(("dp", d), ("sp", s), ("tp", t))`.

    Raises:
        OffloadConfigError: HSDP stands beside sequence or tensor parallelism, or the sizes do not make the world.
    """
    raise_problems("The layout of ranks", parallel_problems(parallel))
    axes: tuple[tuple[str, int], ...]
    if parallel.use_hsdp:
        replicate = parallel.hsdp_replicate_size
        shard = parallel.hsdp_shard_size if parallel.hsdp_shard_size > 0 else max(world_size // replicate, 1)
        axes = (("replicate", replicate), ("shard", shard))
    else:
        sizes = (parallel.data_parallel_size, parallel.sequence_parallel_size, parallel.tensor_parallel_size)
        axes = tuple(zip(("dp", "sp", "tp"), sizes, strict=True))
    if math.prod(size for _, size in axes) != world_size:
        given = " x ".join(f"{name} {size}" for name, size in axes)
        found = f"The layout of ranks: parallel_config asks for {given}, and the world has {world_size} ranks"
        raise OffloadConfigError(OTHER_WORLD.of(found))
    return axes


def gather_axis(parallel: DiffusionParallelConfig) -> str:
    """The axis whose ranks gather weights: HSDP's shard axis, else data parallel, else sequence parallel."""
    if parallel.use_hsdp:
        return "shard"
    return "dp" if parallel.data_parallel_size > 1 else "sp"
