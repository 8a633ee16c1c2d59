"""The drawing of the benchmark of gathered blocks: all-gather beside rank-local streaming."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from layerwise_bound_drawing import figure_of

__all__ = ["draw"]


class _Crossing(Protocol):
    ranks: int
    steps: Mapping[float, float]
    local: float
    found: float


def draw(path: Path, found: Sequence[_Crossing]) -> None:
    """Draw steps over the ratio of the links, and where all-gather is as fast as rank-local streaming.

    Args:
        path: The SVG to write.
        found: One number of ranks each.
    """
    with figure_of(path, 1, (6.4, 3.6)) as (axes,):
        axes.axhline(found[0].local, color="0.4", linewidth=1.2, linestyle="--", label="rank-local")
        for number, one in enumerate(found):
            color = f"C{number}"
            axes.plot([*one.steps], [*one.steps.values()], "-o", color=color, markersize=4, label=f"all-gather, {one.ranks} ranks")
            axes.axvline(one.found, color=color, linewidth=0.8, linestyle=":")
            axes.annotate(f"{one.found:.2f}", (one.found, one.local), (4, 6), textcoords="offset points", color=color)
        axes.axhline(1.0, color="0.7", linewidth=0.8, linestyle=":", label="all computation")
        axes.set_xscale("log", base=2)
        ticks = [ratio for ratio in found[0].steps if ratio.as_integer_ratio()[0] == 1 or (ratio.is_integer() and ratio != 3.0)]
        axes.set_xticks(ticks, [f"{ratio:g}" for ratio in ticks])
        axes.minorticks_off()
        axes.set_xlabel("speed of the link to the peers / to the host")
        axes.set_ylabel("step / all computation")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
