"""What all Stable Diffusion 3 pipelines are made of, and how every encoder runs once for both prompts."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

import attrs
from diffusers import StableDiffusion3Pipeline

from omni_offload import OffloadPlan
from pipelines.parts import ENTRY_POINTS as TEXT_ENTRY_POINTS
from pipelines.parts import TransformerParts

__all__ = ["ENTRY_POINTS", "PLAN", "StableDiffusion3Parts", "StableDiffusion3TextParts"]

_TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")

_TEXT_PLAN = OffloadPlan(
    block_attrs={"transformer": ("transformer_blocks",)},
    encoder_block_attrs={
        "text_encoder": ("text_model.encoder.layers",),
        "text_encoder_2": ("text_model.encoder.layers",),
        "text_encoder_3": ("encoder.block",),
    },
)

PLAN = attrs.evolve(_TEXT_PLAN, encoder_block_attrs={**_TEXT_PLAN.encoder_block_attrs, "image_encoder": ("encoder.layers",)})

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {**TEXT_ENTRY_POINTS, "": (*TEXT_ENTRY_POINTS[""], "encode_image")}
"""For the pipelines that take image prompts."""


@attrs.define
class _Guidance:
    """The negative prompts of one `encode_prompt`, by encoder, and what was encoded of them ahead of time.

    Attributes:
        negatives: Prompts that no encoder has taken yet.
        encoded: Prompts and further arguments, and what the encoder returned for them.
    """

    negatives: dict[str, list[str]]
    encoded: dict[str, tuple[list[str], dict[str, Any], Any]] = attrs.field(factory=dict)

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> "_Guidance":
        """Read the negative prompts of a call; none where the encoders run once only, or upstream will refuse them."""
        prompt = arguments["prompt"]
        given = (arguments["prompt_embeds"], arguments["negative_prompt_embeds"])
        if not arguments["do_classifier_free_guidance"] or prompt is None or any(embeds is not None for embeds in given):
            return _Guidance({})
        batch = 1 if isinstance(prompt, str) else len(prompt)
        first = arguments["negative_prompt"] or ""
        texts = {
            "text_encoder": first,
            "text_encoder_2": arguments["negative_prompt_2"] or first,
            "text_encoder_3": arguments["negative_prompt_3"] or first,
        }
        listed = {name: batch * [text] if isinstance(text, str) else text for name, text in texts.items()}
        return _Guidance(listed if all(isinstance(text, list) and len(text) == batch for text in listed.values()) else {})


_GUIDANCE: ContextVar[_Guidance | None] = ContextVar("guidance", default=None)


class StableDiffusion3TextParts(TransformerParts):
    """The components of a Stable Diffusion 3 pipeline that takes no image prompts.

    With guidance upstream runs the three encoders for the prompts and then again for the negative prompts. Taking turns on the
    device, each of them would be loaded twice, 22.3 GB instead of 11.2 GB in fp16: a budget that holds all three would keep
    them, and nothing else would. Declared as co-residents they would be loaded once, but together, and T5-XXL alone takes
    9.5 GB: more than the DiT of Stable Diffusion 3 Medium (4.2 GB), so that the peak of the whole pipeline would grow to the
    11.2 GB of all three, and every budget below that would be refused.

    So neither is declared. Instead an encoder that is on the device for the prompts takes the negative prompts right after them:
    it is loaded once, alone, with any budget. Each text still is a run of its own, so that the embeddings are upstream's
    bit for bit.
    """

    _encoder_modules: ClassVar[list[str]] = [*_TEXT_ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = _TEXT_PLAN

    @functools.wraps(StableDiffusion3Pipeline.encode_prompt)
    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Encode prompts and negative prompts, encoder by encoder."""
        given = inspect.signature(StableDiffusion3Pipeline.encode_prompt).bind(self, *args, **kwargs)
        given.apply_defaults()
        before = _GUIDANCE.get()
        try:
            _GUIDANCE.set(_Guidance.of(given.arguments))
            return super().encode_prompt(*args, **kwargs)  # type: ignore[misc]  # of the pipeline behind the parts
        finally:
            _GUIDANCE.set(before)

    @functools.wraps(StableDiffusion3Pipeline._get_clip_prompt_embeds)  # noqa: SLF001  (the one that it overrides)
    def _get_clip_prompt_embeds(self, *args: Any, **kwargs: Any) -> Any:
        return self._encode(super()._get_clip_prompt_embeds, *args, **kwargs)  # type: ignore[misc]  # as above

    @functools.wraps(StableDiffusion3Pipeline._get_t5_prompt_embeds)  # noqa: SLF001  (as above)
    def _get_t5_prompt_embeds(self, *args: Any, **kwargs: Any) -> Any:
        return self._encode(super()._get_t5_prompt_embeds, *args, **kwargs)  # type: ignore[misc]  # as above

    @staticmethod
    def _encode(encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Encode prompts, unless that was done ahead of time; and ahead of time the encoder's negative prompts, if they are due."""
        guidance = _GUIDANCE.get()
        given = inspect.signature(encode).bind(*args, **kwargs)
        given.apply_defaults()
        settings = dict(given.arguments)
        prompt = settings.pop("prompt")
        name = ("text_encoder", "text_encoder_2")[settings["clip_model_index"]] if "clip_model_index" in settings else "text_encoder_3"
        if guidance is None:
            return encode(prompt, **settings)
        done = guidance.encoded.pop(name, None)
        if done is not None and done[:2] == (prompt, settings):
            return done[2]
        found = encode(prompt, **settings)
        negative = guidance.negatives.pop(name, None)
        if negative is not None:
            if "clip_skip" in settings:
                settings["clip_skip"] = None  # as upstream does for negative prompts
            guidance.encoded[name] = negative, settings, encode(negative, **settings)
        return found


class StableDiffusion3Parts(StableDiffusion3TextParts):
    """The components of a Stable Diffusion 3 pipeline; `image_encoder` is there for an IP-Adapter only."""

    _encoder_modules: ClassVar[list[str]] = [*_TEXT_ENCODERS, "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = PLAN
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
