"""What the digits pipeline was trained for; a call with other values draws noise."""

__all__ = ["IMAGE_SIZE", "MAX_SEQUENCE_LENGTH", "STEPS", "WORDS"]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""The prompts, in the order of the digits."""

IMAGE_SIZE = 8
"""Height and width of an image, in pixels."""

MAX_SEQUENCE_LENGTH = 8
"""Tokens of a prompt."""

STEPS = 16
"""Denoising steps."""
