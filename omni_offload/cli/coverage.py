"""What of the installed diffusers is registered, for people and as JSON."""

import json
from collections.abc import Iterator

from omni_offload.cli.noise import without_noise

__all__ = ["coverage_lines"]


def coverage_lines(*, as_json: bool) -> Iterator[str]:
    """Yield the coverage line and the classes that are left out for each reason; or one JSON object."""
    with without_noise():
        from pipelines.coverage import coverage  # noqa: PLC0415  (imports all of diffusers)

        found = coverage()
    if as_json:
        data = {"diffusers": found.version, "total": found.total, "registered": found.registered, "left_out": dict(found.left_out)}
        yield json.dumps(data, indent=2)
        return
    yield str(found)
    for reason, names in found.left_out.items():
        yield f"{reason}: {', '.join(names)}"
