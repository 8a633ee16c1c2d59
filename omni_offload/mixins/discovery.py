"""What a pipeline class declares about its components."""

from typing import Any, ClassVar

from omni_offload.config import OffloadPlan
from omni_offload.discovery import validate_declarations

__all__ = ["ComponentDiscoveryMixin"]


class ComponentDiscoveryMixin:
    """The four lists of a pipeline's components, as dotted paths; they are checked when a subclass is defined.

    Attributes:
        _dit_modules: Denoisers (transformers, UNets, priors), in the order of their use.
        _encoder_modules: Text, image and audio encoders.
        _vae_modules: Autoencoders, vocoders.
        _resident_modules: Components that stay on the device while offload is enabled.
        _co_resident_modules: Components that alternate and so are onloaded together, such as `("controlnet", "unet")`.
        _offload_plan: What layer strategies need to know about the components' structure.
    """

    _dit_modules: ClassVar[list[str]] = []
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []
    _resident_modules: ClassVar[list[str]] = []
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = []
    _offload_plan: ClassVar[OffloadPlan | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the declarations.

        Raises:
            ComponentPathError: A path is no string, is listed twice, or is declared co-resident without being a component.
            OffloadConfigError: Another declaration has the wrong form.
        """
        validate_declarations(cls)  # before the other mixin reads them
        super().__init_subclass__(**kwargs)
