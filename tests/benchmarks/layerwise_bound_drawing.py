"""The drawings of the layerwise benchmark: a step over its bound, and its time over device memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerwise_bound_peers import Comparison

__all__ = ["draw_grid", "draw_peers", "figure_of"]

_STYLE = {
    "svg.hashsalt": "omni-offload",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_MARKS = "osD^v<>P*X"


@contextmanager
def figure_of(path: Path, panels: int, size: tuple[float, float]) -> Iterator[Sequence[Any]]:
    """Give panels to draw in, side by side; leaving the context writes an SVG, the same one each time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(1, panels, figsize=size, squeeze=False, layout="constrained")
        yield axes[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
        plt.close(figure)


def draw_grid(path: Path, over: Mapping[tuple[float, float, str], float]) -> None:
    """Draw steps over their bound.

    Args:
        path: The SVG to write.
        over: Copy over computation of a block, part of the blocks that stay, placement -> the step over its bound.
    """
    with figure_of(path, 1, (6.4, 3.6)) as (axes,):
        for color, share in enumerate(sorted({share for _, share, _ in over if share})):
            for placement, line in (("leading", "--o"), ("spread", "-s")):
                points = sorted((ratio, step) for (ratio, part, placed), step in over.items() if (part, placed) == (share, placement))
                axes.plot(*zip(*points, strict=True), line, color=f"C{color}", markersize=4, label=f"{placement}, {share:.0%} resident")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({ratio for ratio, *_ in over}), [f"{ratio:g}" for ratio in sorted({ratio for ratio, *_ in over})])
        axes.minorticks_off()
        axes.set_xlabel("copy of a block / its computation")
        axes.set_ylabel("step / bound")
        axes.legend(frameon=False)


def draw_peers(path: Path, found: Sequence[Comparison]) -> None:
    """Draw the seconds of a step over device memory.

    Args:
        path: The SVG to write.
        found: One comparison a panel.
    """
    with figure_of(path, len(found), (4.2 * len(found), 4.6)) as panels:
        for axes, comparison in zip(panels, found, strict=True):
            for index, point in enumerate(comparison.theirs):
                axes.plot(point.peak / 2**20, point.step, _MARKS[index], color=f"C{index + 1}", label=point.name)
            axes.plot(
                [p.peak / 2**20 for p in comparison.ours],
                [p.step for p in comparison.ours],
                "-o",
                color="C0",
                markersize=4,
                label="omni-offload",
            )
            axes.axhline(comparison.resident.step, color="0.5", linewidth=0.8, linestyle=":", label="everything resident")
            axes.set_title(f"copies / computation = {comparison.ratio:g}")
            axes.set_xlabel("device memory, MiB (peak)")
            axes.set_ylim(bottom=0)
        panels[0].set_ylabel("seconds of a step")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3)
