"""What all Qwen-Image pipelines are made of, and how they let go of what upstream caches for a device."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from diffusers.models.transformers.transformer_qwenimage import QwenEmbedLayer3DRope, QwenEmbedRope

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["BLOCKS", "PLAN", "QwenImageParts", "forget_positions", "letting_go"]

BLOCKS: tuple[str, ...] = ("transformer_blocks",)
"""Of the DiT, and of a ControlNet."""

PLAN = OffloadPlan(
    block_attrs={"transformer": BLOCKS},
    encoder_block_attrs={"text_encoder": ("model.visual.blocks", "model.language_model.layers")},
    encoder_dlo_weight_replication={"text_encoder"},
)


class QwenImageParts(TransformerParts):
    """The components of a Qwen-Image pipeline.

    The text encoder is a whole vision-language model: its head runs in any case, and its vision tower where the prompt comes with
    a picture. The VAE enters its encoder and decoder once a latent frame, so `encode` and `decode` as a whole are the work.
    """

    _offload_plan: ClassVar[OffloadPlan] = PLAN


def letting_go(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that uses no positions from before, and leaves none behind; nor, after an error, frames in the VAE.

    Upstream keeps the DiT's rotary frequencies per device, for ever. While the DiT is on the device, its own tensors are
    what `.to(device)` returns and what is kept; once it is back on the host, a resident run would be handed these.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        forget_positions()
        try:
            return function(self, *args, **kwargs)
        except BaseException:
            self.vae.clear_cache()
            raise
        finally:
            forget_positions()

    return call


def forget_positions() -> None:
    """Empty the caches of the rotary embeddings' methods. They are functions' own, and shared by all instances."""
    for method in _cached_methods():
        inspect.getclosurevars(method).nonlocals["cached"].cache_clear()


def _cached_methods() -> list[Any]:
    names: Mapping[type, tuple[str, ...]] = {
        QwenEmbedRope: ("_get_device_freqs", "_compute_video_freqs"),
        QwenEmbedLayer3DRope: ("_get_device_freqs", "_compute_video_freqs", "_compute_condition_freqs"),
    }
    return [getattr(cls, name) for cls, methods in names.items() for name in methods]
