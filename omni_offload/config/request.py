"""What a caller of `enable_omni_offload` or of the factory asked for."""

from collections.abc import Mapping

import attrs

from omni_offload.config.checks import raise_problems
from omni_offload.config.choices import OffloadStrategy
from omni_offload.config.offload import OffloadConfig
from omni_offload.config.options import OmniDiffusionConfig, read_legacy
from omni_offload.errors import OffloadConfigError, quoted

__all__ = ["make_config", "overridden_requests"]

_ENGINE_FIELDS = tuple(field.name for field in attrs.fields(OmniDiffusionConfig))


def make_config(
    config: OffloadConfig | OmniDiffusionConfig | Mapping[str, object] | str | None = None, **selector_keys: object
) -> OffloadConfig:
    """Resolve what was asked for.

    Args:
        config: A configuration, an engine's configuration (any object with its fields), a selector, a mode, or None,
            which is mode "module".
        **selector_keys: The selector's keys; they merge with None, a mode or a selector.

    Returns:
        The configuration; its strategy is never NONE.

    Raises:
        OffloadConfigError: Something is wrong, a key is given twice or beside another kind of configuration, or nothing
            is asked for.
        NotImplementedError: The mode is "auto".
    """
    if config is None or isinstance(config, str | Mapping):
        return OffloadConfig.from_od_config(OmniDiffusionConfig(diffusion_offload_config=_merge_selector(config, selector_keys)))
    problems = []
    if selector_keys:
        problems.append(f"{', '.join(selector_keys)} stand beside a {type(config).__name__}, which says it all; put them into it")
    if not isinstance(config, OffloadConfig):
        if not any(hasattr(config, name) for name in _ENGINE_FIELDS):
            problems.append(f"config is {quoted(config)}; give a mode, a selector, an OffloadConfig or an engine's configuration")
        raise_problems("Offload cannot be configured", problems)
        config = OffloadConfig.from_od_config(config)
    raise_problems("Offload cannot be configured", problems)
    if config.strategy is OffloadStrategy.NONE:
        raise OffloadConfigError("Offload was to be enabled with a configuration that resolves to NONE; name a mode: 'module' or 'layer'")
    return config


def _merge_selector(config: Mapping[str, object] | str | None, keys: Mapping[str, object]) -> dict[str, object]:
    if config is None:
        return {"mode": "module", **keys}
    selector = {"mode": config} if isinstance(config, str) else dict(config)
    twice = [f"{key} is given twice; give it once" for key in keys if key in selector]
    raise_problems("Offload cannot be configured", twice)
    return {**selector, **keys}


def overridden_requests(od_config: object) -> tuple[str, ...]:
    """The legacy booleans that ask for a strategy and lose to a stronger one; the factory logs a line for each.

    Args:
        od_config: An `OmniDiffusionConfig`, or any object with its attributes.

    Returns:
        Names of fields; none where there is a selector, beside which a boolean that differs is an error.
    """
    if getattr(od_config, "diffusion_offload_config", None) is not None:
        return ()
    return read_legacy(od_config, []).requested[1:]
