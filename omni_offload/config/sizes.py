"""Sizes in bytes, read and written."""

import re

from omni_offload.errors import OffloadConfigError, quoted

__all__ = ["format_bytes", "parse_bytes"]

_BOUND = 2**63

_UNITS: dict[str, int] = {"b": 1, **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([a-zA-Z]+)")


def parse_bytes(value: object) -> int:
    """Read a size.

    Args:
        value: Bytes as an int, or a number with a unit: "12GiB", "800 MiB", "1.5GB" (KiB, MiB, GiB, TiB are powers of
            1024; KB, MB, GB, TB of 1000; B is one byte; case does not matter).

    Returns:
        The size in bytes, a fraction of a byte dropped (sizes are upper bounds).

    Raises:
        OffloadConfigError: The value is neither.
    """
    size = value if isinstance(value, int) and not isinstance(value, bool) else _read(value) if isinstance(value, str) else None
    if size is None or not 0 <= size < _BOUND:
        raise OffloadConfigError(
            f"{quoted(value)} is not a size; give bytes as an int >= 0 and < 2**63, or a string like '12GiB' or '800MiB'"
        )
    return size


def _read(text: str) -> int | None:
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        return None
    whole, _, fraction = match[1].partition(".")
    return int(whole) * unit + int(fraction or 0) * unit // int(10 ** len(fraction))


def format_bytes(n: int) -> str:
    """Write a size for people.

    Args:
        n: Bytes.

    Returns:
        At most one decimal in the largest binary unit that leaves at least 1: "11.5 GiB", "800 MiB", "17 B".
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.1f}".removesuffix(".0") + f" {unit}"
        size /= 1024
    return f"{size:.1f}".removesuffix(".0") + " TiB"
