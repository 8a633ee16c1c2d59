"""What upstream classes log."""

import logging

__all__ = ["log_errors_only"]


def log_errors_only(cls: type) -> None:
    """Let the module of a class log errors only, from here on: it warns of what a case does on purpose, in every call."""
    logging.getLogger(cls.__module__).setLevel(logging.ERROR)
