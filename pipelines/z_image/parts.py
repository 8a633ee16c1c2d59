"""What all Z-Image pipelines are made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["ZImageParts", "positions_of_a_call"]


class ZImageParts(TransformerParts):
    """The components of a Z-Image pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("noise_refiner", "context_refiner", "layers")}, encoder_block_attrs={"text_encoder": ("layers",)}
    )


@contextmanager
def positions_of_a_call(transformer: Any) -> Iterator[None]:
    """Let a call have rotary frequencies of its own, and leave none on the device, in any case.

    The DiT's `rope_embedder` is no module: it makes its table at the first use, and moves it to where the positions are, for good.
    """
    transformer.rope_embedder.freqs_cis = None
    try:
        yield
    finally:
        transformer.rope_embedder.freqs_cis = None
