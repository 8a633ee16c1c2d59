"""What is wrong, gathered so that one error names it all."""

from collections.abc import Iterable
from difflib import get_close_matches

from omni_offload.errors import ComponentPathError, OffloadConfigError

__all__ = ["Problems", "class_name", "nearest"]


class Problems:
    """Problems of one request on one object, in the order in which they were found.

    Args:
        subject: What was asked, and of what.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._found: list[str] = []
        self._about_paths = False

    def about_path(self, text: str) -> None:
        """Add a path that the pipeline and a declaration disagree on."""
        self._about_paths = True
        self._found.append(text)

    def about_config(self, text: str) -> None:
        """Add a request that cannot be served, or a declaration of another type."""
        self._found.append(text)

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def raise_any(self) -> None:
        """Raise one error for all problems, if there are any.

        Raises:
            ComponentPathError: One of them is about a path.
            OffloadConfigError: None of them is.
        """
        if self._found:
            error = ComponentPathError if self._about_paths else OffloadConfigError
            raise error(f"{self._subject}: " + "; ".join(self._found))


def class_name(obj: object) -> str:
    """The name of an object's class, or of the class itself."""
    return obj.__qualname__ if isinstance(obj, type) else type(obj).__qualname__


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about a missing name: the nearest known ones, else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=2)
    if close:
        return f"nearest are {', '.join(map(repr, close))}"
    more = ", ..." if len(names) > 10 else ""
    return f"known are {', '.join(map(repr, names[:10]))}{more}" if names else "there are none"
