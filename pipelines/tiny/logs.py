"""What upstream classes log of what a case does on purpose."""

import logging

import attrs

__all__ = ["DEPRECATED", "NOTHING_IN_FLOAT32", "keep_back"]

#: Upstream's warning of every pipeline that it no longer changes.
DEPRECATED = "has been deprecated and will not receive bug fixes"

#: Its warning of every cast of a model, where no module must keep its type.
NOTHING_IN_FLOAT32 = "that should be kept in float32: []"


@attrs.frozen
class _Without:
    """Drops the messages that hold a text; equal ones are one filter of a logger."""

    text: str

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


def keep_back(cls: type, text: str) -> None:
    """Have the module of a class not log, from here on, the messages that hold a text; whatever else it logs is logged.

    Args:
        cls: A class of the module that logs.
        text: What tells the messages, of what a case does on purpose.
    """
    logging.getLogger(cls.__module__).addFilter(_Without(text))
