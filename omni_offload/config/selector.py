"""The selector: the canonical way to say what is offloaded, and how."""

from collections import Counter
from collections.abc import Mapping
from typing import cast

import attrs

from omni_offload.config.checks import (
    check_bool,
    check_choice,
    check_int,
    check_keys,
    check_size,
    did_you_mean,
    raise_problems,
)
from omni_offload.config.choices import OffloadMode, OffloadStrategy
from omni_offload.config.options import LayerOptions, read_layer_options
from omni_offload.errors import quoted
from omni_offload.protocols import DIT_COMPONENT, TEXT_ENCODER_COMPONENT, VAE_COMPONENT

__all__ = ["COMPONENTS", "SELECTOR_KEYS", "Selector", "parse_selector", "read_components", "read_selector"]

COMPONENTS = (DIT_COMPONENT, TEXT_ENCODER_COMPONENT, VAE_COMPONENT)
"""The kinds of components that a selector may name."""

SELECTOR_KEYS = (
    "mode",
    "components",
    "layer_options",
    "pin_memory",
    "slots",
    "keep_between_calls",
    "device_memory",
    "host_memory",
)


@attrs.frozen(kw_only=True)
class Selector:
    """A selector that was read: every key checked, None where it was left out and has no default of its own.

    Args:
        mode: The granularity.
        components: Selected kinds; None: left out.
        layer_options: Options by kind.
        pin_memory: Whether host memory is page-locked.
        slots: Device buffers of a ring.
        keep_between_calls: Whether weights may stay on the device between calls.
        device_memory: Upper bound on device bytes.
        host_memory: Upper bound on pinned host bytes.
    """

    mode: OffloadMode
    components: frozenset[str] | None = None
    layer_options: Mapping[str, LayerOptions] = attrs.field(factory=dict, hash=False)
    pin_memory: bool | None = None
    slots: int = 3
    keep_between_calls: bool = False
    device_memory: int | None = None
    host_memory: int | None = None

    @property
    def strategy(self) -> OffloadStrategy:
        """The strategy it asks for: layer mode is a distributed one where any `weight_transfer` is given."""
        if self.mode is OffloadMode.MODULE:
            return OffloadStrategy.MODEL_LEVEL
        if any(options.weight_transfer is not None for options in self.layer_options.values()):
            return OffloadStrategy.DISTRIBUTED_LAYERWISE
        return OffloadStrategy.LAYERWISE


def read_components(where: str, value: object, problems: list[str]) -> frozenset[str] | None:
    """Read a non-empty collection of kinds of components, each named once; None stays None."""
    if value is None:
        return None
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        example = f"[{value!r}]" if isinstance(value, str) and value in COMPONENTS else "['dit']"
        problems.append(f"{where} is {quoted(value)}; give a non-empty list of component names, such as {example}")
        return None
    found = len(problems)
    for name, count in Counter(value).items() if all(isinstance(name, str) for name in value) else ():
        if name not in COMPONENTS:
            problems.append(f"{where} names {quoted(name)}; {did_you_mean(name, COMPONENTS)}")
        elif count > 1:
            problems.append(f"{where} names {name!r} {count} times; name it once")
    problems.extend(f"{where} holds {quoted(name)}; give strings" for name in value if not isinstance(name, str))
    return None if len(problems) > found else frozenset(value)


def read_options_by_component(where: str, value: object, components: frozenset[str] | None, problems: list[str]) -> dict[str, LayerOptions]:
    """Read the options of every component; one that is not selected has none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"{where} is {quoted(value)}; give a mapping of component -> options")
        return {}
    options: dict[str, LayerOptions] = {}
    for name, fields in value.items():
        if name not in COMPONENTS:
            problems.append(f"{where} names {quoted(name)}; {did_you_mean(name, COMPONENTS)}")
        elif components is not None and name not in components:
            problems.append(f"{where} has options for {name!r}, which components leaves out; select it, or drop them")
        options[str(name)] = read_layer_options(f"{where}.{name}", fields, problems)
    return options


def read_selector(value: object, problems: list[str]) -> Selector | None:
    """Read a selector and name what is wrong with it; None where it has no usable mode.

    Raises:
        NotImplementedError: The mode is "auto", and nothing else is wrong.
    """
    if not isinstance(value, Mapping):
        problems.append(f"the selector is {quoted(value)}; give a mapping with keys of {', '.join(SELECTOR_KEYS)}")
        return None
    check_keys("the selector", value, SELECTOR_KEYS, problems)
    mode = check_choice("mode", value.get("mode"), OffloadMode, problems)
    if value.get("mode") is None:
        problems.append("mode is missing; give 'module' or 'layer'")
    components = read_components("components", value.get("components"), problems)
    options = read_options_by_component("layer_options", value.get("layer_options"), components, problems)
    if mode is OffloadMode.MODULE and options:
        problems.append("layer_options stand beside mode 'module', which streams nothing; drop them, or use mode 'layer'")
    pin = None if value.get("pin_memory") is None else check_bool("pin_memory", value["pin_memory"], problems, default=True)
    selector = Selector(
        mode=mode or OffloadMode.MODULE,
        components=components,
        layer_options=options,
        pin_memory=pin,
        slots=check_int("slots", value.get("slots"), problems, minimum=2) or 3,
        keep_between_calls=check_bool("keep_between_calls", value.get("keep_between_calls"), problems, default=False),
        device_memory=check_size("device_memory", value.get("device_memory"), problems, minimum=1),
        host_memory=check_size("host_memory", value.get("host_memory"), problems, minimum=0),
    )
    if mode is OffloadMode.AUTO and not problems:
        raise NotImplementedError("mode 'auto' needs a planner, which does not exist yet; use 'module' or 'layer'")
    return None if mode is None else selector


def parse_selector(value: Mapping[str, object]) -> Selector:
    """Read a selector.

    Args:
        value: A mapping with the keys

            - `mode` (required): "module" or "layer";
            - `components`: non-empty list of "dit", "text_encoder", "vae";
            - `layer_options`: component -> the fields of `LayerOptions`;
            - `pin_memory`: bool;
            - `slots`: int >= 2, default 3, one set of device buffers a device;
            - `keep_between_calls`: bool, default False;
            - `device_memory`, `host_memory`: bytes as an int, or "12GiB"; upper bounds.

            A key whose value is None counts as left out.

    Returns:
        The selector, checked.

    Raises:
        OffloadConfigError: Something is wrong; the message names every problem.
        NotImplementedError: The mode is "auto".
    """
    problems: list[str] = []
    selector = read_selector(value, problems)
    raise_problems("The selector cannot be read", problems)
    return cast("Selector", selector)  # without problems there is one
