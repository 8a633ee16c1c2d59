"""Sana Video pipelines that own their offloading: from text and from a picture.

Their VAE is Wan's, a deep-compression one, or that of LTX-2, whose statistics the pipelines copy to where the latents are.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from diffusers import SanaImageToVideoPipeline, SanaVideoPipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.parts import TransformerParts

__all__ = ["OmniSanaImageToVideoPipeline", "OmniSanaVideoPipeline"]


def _raising_out_of_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that raises the error where there is no room to decode: upstream warns, and fails as it has no video.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="(?s).*Try to use VAE tiling")
            try:
                return function(self, *args, **kwargs)
            except UserWarning as warning:
                if isinstance(warning.__context__, torch.OutOfMemoryError):
                    raise warning.__context__ from None
                raise

    return call


class _SanaVideoParts(TransformerParts):
    """The components of a Sana Video pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)}, encoder_block_attrs={"text_encoder": ("layers",)}
    )


class OmniSanaVideoPipeline(_SanaVideoParts, SanaVideoPipeline):
    """`SanaVideoPipeline` that owns its offloading."""

    __call__ = leaving_nothing(_raising_out_of_memory(SanaVideoPipeline.__call__))


class OmniSanaImageToVideoPipeline(_SanaVideoParts, SanaImageToVideoPipeline):
    """`SanaImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""

    __call__ = leaving_nothing(_raising_out_of_memory(SanaImageToVideoPipeline.__call__))
