"""What a user can put right, in one line."""

__all__ = ["InputError", "one_line"]

_LONGEST = 1000


class InputError(Exception):
    """A request that cannot be carried out as it was made; the message is for the user."""


def one_line(error: BaseException | str) -> str:
    """Return a message without line breaks; a lookup error's message without its quotes."""
    text = " ".join(str(error).split())
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
