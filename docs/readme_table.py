"""Put the table of docs/benchmarks/model_level.md into README.md, in fewer columns: `python docs/readme_table.py`."""  # noqa: INP001  (no package)

import re
from pathlib import Path

__all__ = ["filled", "table"]

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "benchmarks" / "model_level.md"
README = ROOT / "README.md"
MARKERS = ("<!-- table: model_level -->\n", "<!-- end of table -->")
BUDGET = "`device_memory`"
HEAD = (
    "| pipeline shape | `device_memory` | time / diffusers | weight bytes moved / diffusers | time / best possible | peak of weights, MiB |"
)


def table(text: str) -> str:
    """Return the README's table, made of the page that the benchmark wrote.

    Args:
        text: The page; one of its tables has a column for the budget, and one for each figure.
    """
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    head = next(row for row in rows if BUDGET in row)
    body = rows[rows.index(head) + 2 :]
    totals = {row[0]: row[1] for row in rows[2 : rows.index(head)]}
    lines = [HEAD, "|" + " --- |" * HEAD.count(" |")]
    for row in body:
        found = dict(zip(head, row, strict=True))
        figures = (found["ours / diffusers"], found["moved ratio"], found["ours / best"], f"{found['peak']} of {totals[found['shape']]}")
        lines.append("| " + " | ".join((found["shape"], found[BUDGET], *figures)) + " |")
    return "\n".join(lines)


def filled(readme: str, text: str) -> str:
    """Return the README with the table between its markers."""
    pattern = re.escape(MARKERS[0]) + r".*?" + re.escape(MARKERS[1])
    return re.sub(pattern, lambda _: f"{MARKERS[0]}\n{table(text)}\n\n{MARKERS[1]}", readme, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8"), SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
