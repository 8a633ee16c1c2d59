"""The command line as `python -m omni_offload`."""

import sys

from omni_offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
