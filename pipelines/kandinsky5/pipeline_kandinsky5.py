"""Kandinsky 5 pipelines that own their offloading: images and videos, from text and from a picture."""

import functools
from typing import Any, ClassVar

from diffusers import Kandinsky5I2IPipeline, Kandinsky5I2VPipeline, Kandinsky5T2IPipeline, Kandinsky5T2VPipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniKandinsky5I2IPipeline", "OmniKandinsky5I2VPipeline", "OmniKandinsky5T2IPipeline", "OmniKandinsky5T2VPipeline"]

_ENCODERS = ("text_encoder", "text_encoder_2")


class _Kandinsky5Parts(TransformerParts):
    """The components of a Kandinsky 5 pipeline.

    The two text encoders are on the device together, as they run for the prompts and then again for the negative prompts. The
    blocks for text run before those for pictures.
    """

    _encoder_modules: ClassVar[list[str]] = list(_ENCODERS)
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [_ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("text_transformer_blocks", "visual_transformer_blocks")},
        encoder_block_attrs={
            "text_encoder": ("model.visual.blocks", "model.language_model.layers"),
            "text_encoder_2": ("encoder.layers",),
        },
    )


class OmniKandinsky5T2IPipeline(_Kandinsky5Parts, Kandinsky5T2IPipeline):
    """`Kandinsky5T2IPipeline` that owns its offloading."""


class OmniKandinsky5I2IPipeline(_Kandinsky5Parts, Kandinsky5I2IPipeline):
    """`Kandinsky5I2IPipeline` that owns its offloading; the first text encoder sees the picture, and the VAE encodes it."""

    @functools.wraps(Kandinsky5I2IPipeline._encode_prompt_qwen)  # noqa: SLF001  (of its own base)
    def _encode_prompt_qwen(self, *args: Any, **kwargs: Any) -> Any:
        """Let go of what the text encoder keeps for tokens that it could write next: a budget has no room for that."""
        try:
            return super()._encode_prompt_qwen(*args, **kwargs)
        finally:
            self.text_encoder.model.rope_deltas = None


class OmniKandinsky5T2VPipeline(_Kandinsky5Parts, Kandinsky5T2VPipeline):
    """`Kandinsky5T2VPipeline` that owns its offloading."""


class OmniKandinsky5I2VPipeline(_Kandinsky5Parts, Kandinsky5I2VPipeline):
    """`Kandinsky5I2VPipeline` that owns its offloading; the VAE encodes the first frame."""
