"""The command line: see which pipelines there are, and run one offloaded."""

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]

PROGRAM = "omni-offload"
BAD_INPUT = 2
"""Exit status of everything that the user can put right."""

_PACKAGES = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Bad input, a missing package and what a machine cannot do end in one line on standard error and status 2; an error of
    the program itself keeps its traceback.

    Args:
        arguments: What follows the program's name; None: what the process was started with.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"{PROGRAM}: the command line needs {' and '.join(missing)}: install its extra, `pip install 'omni-offload[cli]'`\n"
        )
        return BAD_INPUT
    from omni_offload.cli.app import run_app  # noqa: PLC0415  (the packages of the extra are imported only where they exist)

    return run_app(sys.argv[1:] if arguments is None else arguments)
