"""What all Z-Image pipelines are made of."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["PLAN", "ZImageParts", "with_own_positions"]

PLAN = OffloadPlan(
    block_attrs={"transformer": ("noise_refiner", "context_refiner", "layers")}, encoder_block_attrs={"text_encoder": ("layers",)}
)


class ZImageParts(TransformerParts):
    """The components of a Z-Image pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = PLAN


def with_own_positions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that has rotary frequencies of its own, and leaves none on the device, in any case.

    The DiT's `rope_embedder` is no module: it makes its table at the first use, and moves it to where the positions are, for good.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        embedder = self.transformer.rope_embedder
        embedder.freqs_cis = None
        try:
            return function(self, *args, **kwargs)
        finally:
            embedder.freqs_cis = None

    return call
