"""`OmniWanImageToVideoPipeline`: owns its model-level offloading by hand, stage by stage.

Everything else (declarations, layer modes) it has from the mixin. What is by hand here, and why: the VAE encodes the picture
before the DiTs run and decodes the video after them. As one component it would bring both halves to the device twice; as two
stages each half goes there once.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from diffusers import WanImageToVideoPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin
from pipelines.wan.staging import Staging

__all__ = ["OmniWanImageToVideoPipeline"]


class OmniWanImageToVideoPipeline(OmniOffloadMixin, WanImageToVideoPipeline):
    """`WanImageToVideoPipeline` that owns its offloading.

    Wan 2.1 has an image encoder and one DiT; Wan 2.2 has two DiTs and no image encoder.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "image_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)},
        encoder_block_attrs={"text_encoder": ("encoder.block",), "image_encoder": ("encoder.layers",)},
        encoder_dlo_weight_replication={"text_encoder"},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "": ("encode_prompt", "encode_image", "decode_latent"),
    }

    _staging: Staging | None = None

    def enable_omni_model_cpu_offload(
        self,
        *,
        device: torch.device,
        pin_memory: bool,
        use_hsdp: bool,
        offload_components: frozenset[str] | None = None,
    ) -> None:
        """Let the stages take turns on the device. All or nothing.

        Args:
            device: Where the stages run.
            pin_memory: Whether the weights on the host are pinned.
            use_hsdp: Whether parameters are sharded. A sharded parameter is refused by name.
            offload_components: Kinds that take turns; components of other kinds are on the device while this is enabled.
                None: all take turns.

        Raises:
            OffloadStateError: Another owner manages a component.
            OffloadConfigError: A weight cannot be moved, or would be moved by no stage.
        """
        staging = Staging(device=device, pin_memory=pin_memory, kinds=offload_components)
        staging.plan(self)
        self._staging = staging
        try:
            staging.enable()
        except BaseException as error:
            failure = staging.undo()
            if failure is None:
                self._staging = None
            else:  # what is left is disable's to repair
                error.add_note(f"putting the stages back failed too: {failure!r}")
            raise
        staging.commit()

    def disable_omni_model_cpu_offload(self) -> None:
        """Bring all weights to the host and remove the hooks. Idempotent; every step runs, the first failure is raised."""
        if self._staging is not None:
            self._staging.disable()
            self._staging = None

    @functools.wraps(WanImageToVideoPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; when it ends, however it ends, no stage is left on the device."""
        with self._call():
            return super().__call__(*args, **kwargs)

    @functools.wraps(WanImageToVideoPipeline.encode_prompt)
    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Encode prompts; a call of its own where it is not part of one."""
        with self._call():
            return super().encode_prompt(*args, **kwargs)

    @functools.wraps(WanImageToVideoPipeline.encode_image)
    def encode_image(self, *args: Any, **kwargs: Any) -> Any:
        """Encode pictures; a call of its own where it is not part of one."""
        with self._call():
            return super().encode_image(*args, **kwargs)

    @torch.no_grad()
    def decode_latent(self, latents: torch.Tensor, *, output_type: str = "np") -> Any:
        """Decode what a call with `output_type="latent"` returned.

        Args:
            latents: `[B, C, T, H, W]`, normalised, on any device.
            output_type: `"np"`, `"pt"` or `"pil"`.

        Returns:
            The frames, as the call itself would have returned them.
        """
        with self._call():
            device = self.vae.device if self._staging is None else self._staging.device
            latents = latents.to(device=device, dtype=self.vae.dtype)
            shape = (1, self.vae.config.z_dim, 1, 1, 1)
            mean = torch.tensor(self.vae.config.latents_mean).view(shape).to(latents)
            inverse_deviation = 1.0 / torch.tensor(self.vae.config.latents_std).view(shape).to(latents)
            video = self.vae.decode(latents / inverse_deviation + mean, return_dict=False)[0]
            return self.video_processor.postprocess_video(video, output_type=output_type)

    def _stage(self, name: str) -> AbstractContextManager[None]:
        """Have one stage on the device while the body runs; the others leave before it comes.

        Args:
            name: `text_encoder`, `image_encoder`, `transformer`, `transformer_2`, `vae_encoder` or `vae_decoder`.
        """
        return nullcontext() if self._staging is None else self._staging.stage(name)

    def _call(self) -> AbstractContextManager[None]:
        """Free the device when the outermost body ends, however it ends."""
        return self._forgetting_features() if self._staging is None else self._staging.call(self)

    @contextmanager
    def _forgetting_features(self) -> Iterator[None]:
        """After an error let the VAE go of the features that it keeps between frames, which are on the device."""
        try:
            yield
        except BaseException:
            self.vae.clear_cache()
            raise
