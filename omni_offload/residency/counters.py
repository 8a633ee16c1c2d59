"""What is counted of a residency."""

import attrs

__all__ = ["Counters"]


@attrs.define
class Counters:
    """What happened to one residency; bytes are counted as copied, padding included."""

    bytes_in: int = 0
    bytes_out: int = 0
    loads: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    wasted_copies: int = 0
