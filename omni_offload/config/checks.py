"""Checks of values that come from outside; each adds what is wrong to a list, so that one error can name it all."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import TypeVar

from omni_offload.config.sizes import parse_bytes
from omni_offload.errors import OffloadConfigError, quoted

E = TypeVar("E", bound=Enum)

__all__ = [
    "check_bool",
    "check_choice",
    "check_int",
    "check_keys",
    "check_path",
    "check_size",
    "did_you_mean",
    "raise_problems",
]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names) or 'none'}"


def check_keys(where: str, value: Mapping[object, object], known: Collection[str], problems: list[str]) -> None:
    """Name the keys of `value` that are not `known`."""
    problems.extend(f"{where} has an unknown key {quoted(key)}; {did_you_mean(key, known)}" for key in value if key not in known)


def check_bool(where: str, value: object, problems: list[str], *, default: bool) -> bool:
    """A bool; None is the default."""
    if value is None or isinstance(value, bool):
        return default if value is None else value
    problems.append(f"{where} is {quoted(value)}; give True or False")
    return default


def check_int(where: str, value: object, problems: list[str], *, minimum: int) -> int | None:
    """An int (a bool is none) of at least `minimum` that 32 bits hold, or None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**31):
        return value
    problems.append(f"{where} is {quoted(value)}; give an int >= {minimum} and < 2**31")
    return None


def check_choice(where: str, value: object, choices: type[E], problems: list[str]) -> E | None:
    """A member of an enum, or its value, or None."""
    if value is None or isinstance(value, choices):
        return value
    names = {str(choice.value): choice for choice in choices}
    if isinstance(value, str) and value in names:
        return names[value]
    problems.append(f"{where} is {quoted(value)}; {did_you_mean(value, names)}")
    return None


def check_size(where: str, value: object, problems: list[str], *, minimum: int) -> int | None:
    """A size of at least `minimum` bytes, or None."""
    if value is None:
        return None
    try:
        size = parse_bytes(value)
    except OffloadConfigError as error:
        problems.append(f"{where}: {error}")
        return None
    if size < minimum:
        problems.append(f"{where} is {quoted(value)}; give at least {minimum} byte")
        return None
    return size


def check_path(where: str, value: object, problems: list[str]) -> Path | None:
    """A path, or None."""
    if value is None or isinstance(value, Path):
        return value
    if isinstance(value, str) and value:
        return Path(value)
    problems.append(f"{where} is {quoted(value)}; give a path")
    return None


def raise_problems(subject: str, problems: list[str]) -> None:
    """Raise one error for all problems, if there are any.

    Args:
        subject: What was asked, and of what.
        problems: Sentences, each with what was found and what to do.

    Raises:
        OffloadConfigError: There are problems.
    """
    if problems:
        raise OffloadConfigError(f"{subject}: " + "; ".join(problems))
