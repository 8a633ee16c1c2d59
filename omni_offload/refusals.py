"""What offload over several ranks refuses: each combination once, with what to do instead. Messages and documentation are made of it."""

import attrs

__all__ = ["REFUSALS", "Refusal"]


@attrs.frozen
class Refusal:
    """A request that is refused before anything is touched.

    Attributes:
        request: What is asked for, in Markdown.
        instead: What to do, in Markdown; every message of it ends so.
    """

    request: str
    instead: str

    def of(self, found: str) -> str:
        """Return the message: what was found, and what to do.

        Args:
            found: What was asked for, on which object, and what was found.
        """
        return f"{found}; {self.instead.replace('`', '')}"


HSDP_BESIDE_OTHERS = Refusal("HSDP beside sequence or tensor parallelism", "use HSDP alone, or switch it off")
OTHER_WORLD = Refusal("sizes whose product is not the number of processes", "give sizes whose product is the world size, or pass a mesh")
NO_WORLD = Refusal("sizes of more than one rank without a world of processes", "call `init_process_group()` first")
OTHER_MESH = Refusal("a mesh whose axes have other sizes than `parallel_config`", "give both the same")
NAMELESS_MESH = Refusal("a mesh that names no axes", "give `mesh_dim_names` such as `('dp', 'sp', 'tp')`")
OUTSIDE_MESH = Refusal("a mesh that this rank is not in", "enable offload on its ranks")
TAKEN_BLOCKS = Refusal(
    "streamed blocks that `fully_shard` has taken",
    "every weight has one owner: leave them out by `fully_shard(ignored_params=streamed_parameters(pipeline, config))`",
)
TAKEN_COMPONENT = Refusal(
    "at model level: `use_hsdp`, or components that `fully_shard` has taken",
    "use mode 'layer', or leave what is sharded unselected and `use_hsdp` off",
)
FLAT_WEIGHTS = Refusal("components with modules that are wrapped in `FullyShardedDataParallel` (FSDP1)", "use `fully_shard` (FSDP2)")
SPREAD_BLOCKS = Refusal(
    "streamed blocks that are distributed (`DTensor`) over others than tensor-parallel ranks",
    "give their mesh's size as `tensor_parallel_size`, or leave the blocks whole",
)
UNEQUAL_ENCODER = Refusal(
    "`'allgather'` for an encoder that is not declared to be equal on all ranks",
    "name it in `encoder_dlo_weight_replication`, or use 'rank-local'",
)
SHARED_MEMORY = Refusal("a gathered block that shares memory with another component", "name its module in `rest_submodules`")
SKIPPING_CACHE = Refusal(
    "caches of diffusers that skip blocks by what is computed (first-block and SeaCache) on a gathered component",
    "call `disable_cache()` first, or use `weight_transfer` 'rank-local'",
)
UNWATCHED_WEIGHTS = Refusal(
    "inference tensors, and modules in training mode with large buffers, in gathered blocks",
    "load it outside of `torch.inference_mode()`, call `eval()`, or use `weight_transfer` 'rank-local'",
)
UNPINNED_REGISTRATION = Refusal("`dlo_host_registration_limit_gib` without pinning", "drop one")
UNUSED_REGISTRATION = Refusal("`dlo_host_registration_limit_gib` where all that streams is gathered", "leave it 0")

REFUSALS = (
    *(HSDP_BESIDE_OTHERS, OTHER_WORLD, NO_WORLD, OTHER_MESH, NAMELESS_MESH, OUTSIDE_MESH),
    *(TAKEN_BLOCKS, TAKEN_COMPONENT, FLAT_WEIGHTS, SPREAD_BLOCKS),
    *(UNEQUAL_ENCODER, SHARED_MEMORY, SKIPPING_CACHE, UNWATCHED_WEIGHTS),
    *(UNPINNED_REGISTRATION, UNUSED_REGISTRATION),
)
"""Every refusal, in the order of the documentation."""
