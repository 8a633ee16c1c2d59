"""The stages of the Wan image-to-video pipeline: the VAE is two, since encoding and decoding use different halves of it."""

from collections.abc import Mapping

import attrs
from torch import nn

from omni_offload import DIT_COMPONENT, TEXT_ENCODER_COMPONENT, VAE_COMPONENT
from omni_offload.errors import OffloadConfigError

__all__ = ["WORKS", "Work", "require_whole"]


@attrs.frozen(kw_only=True)
class Work:
    """What a stage is: the children of a component that it brings to the device, and the method that is its work."""

    component: str
    kind: str | None
    method: str = "forward"
    children: tuple[str, ...] = ()

    def modules(self, component: nn.Module) -> list[nn.Module]:
        """Return what goes to the device."""
        if not self.children:
            return [component]
        return [child for name in self.children if (child := getattr(component, name)) is not None]


WORKS: Mapping[str, Work] = {
    "text_encoder": Work(component="text_encoder", kind=TEXT_ENCODER_COMPONENT),
    "image_encoder": Work(component="image_encoder", kind=None),
    "vae_encoder": Work(component="vae", kind=VAE_COMPONENT, method="encode", children=("encoder", "quant_conv")),
    "transformer": Work(component="transformer", kind=DIT_COMPONENT),
    "transformer_2": Work(component="transformer_2", kind=DIT_COMPONENT),
    "vae_decoder": Work(component="vae", kind=VAE_COMPONENT, method="decode", children=("decoder", "post_quant_conv")),
}


def require_whole(vae: nn.Module) -> None:
    """Refuse an autoencoder with weights that none of the stages would move."""
    works = [work for work in WORKS.values() if work.component == "vae"]
    staged = {id(tensor) for work in works for module in work.modules(vae) for tensor in (*module.parameters(), *module.buffers())}
    left = [name for name, tensor in (*vae.named_parameters(), *vae.named_buffers()) if id(tensor) not in staged]
    if left:
        raise OffloadConfigError(f"{type(vae).__name__} holds weights that are in neither half of it: {', '.join(left)}")
