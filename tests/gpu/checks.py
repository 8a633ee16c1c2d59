"""What only a real accelerator shows: pinning, streams, equality, peaks, copy speed, and the contract; see run.sh.

Each section is a function of a `Machine` that returns figures and raises `AssertionError` where a rule does not hold.
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEEDED = ("torch", "attrs", "typing_extensions", "diffusers", "transformers", "accelerate", "safetensors", "PIL", "sentencepiece")
OLDEST_TORCH = (2, 11)
TIME_LIMIT = 180.0  # seconds for everything; the contract gives up what does not fit
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run all sections and write the figures. Status 0: all held, or no GPU; 1: a section failed; 2: something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="a device; left out: the machine's accelerator")
    parser.add_argument("--quick", action="store_true", help="small sizes and few contract checks")
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        _say(f"missing packages: {', '.join(missing)}; give a folder with their wheels as WHEELS=DIR", sys.stderr)
        return 2

    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        _say(f"torch {torch.__version__} is too old; {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer is needed", sys.stderr)
        return 2
    simulated = (options.device or "").startswith("sim")
    if options.device is None and not torch.accelerator.is_available():
        _say("no GPU: nothing to check here")
        return 0
    if simulated:
        from omni_offload.testing import sim

        sim.install(mode="threads", races="record")
        torch.set_num_threads(1)  # its kernels are tiny

    sys.path.insert(0, str(Path(__file__).parent))
    from sections import SECTIONS, Machine

    machine = Machine.of(options.device, quick=options.quick, deadline=time.monotonic() + TIME_LIMIT)
    results = [_run(name, section, machine) for name, section in SECTIONS.items()]
    figures = {
        "device": machine.name,
        "torch": torch.__version__,
        "diffusers": importlib.import_module("diffusers").__version__,
        "python": platform.python_version(),
        "quick": options.quick,
        "sections": results,
    }
    folder = Path(os.environ.get("OUT") or ROOT / "docs" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(_markdown(figures), encoding="utf-8")
    failed = [result["name"] for result in results if not result["held"]]
    _say(f"{len(results) - len(failed)} of {len(results)} sections held on {machine.name}; figures in {folder}/gpu.md")
    return 1 if failed else 0


def _say(text: str, stream: Any = None) -> None:
    (stream or sys.stdout).write(f"{text}\n")


def _run(name: str, section: Callable[[Any], dict[str, Any]], machine: Any) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        figures, error = section(machine), None
    except Exception as caught:  # a section that fails must not keep the others from running
        traceback.print_exc()
        figures, error = getattr(caught, "figures", {}), f"{type(caught).__name__}: {caught}"
    finally:
        machine.clean_up()
    seconds = time.perf_counter() - start
    _say(
        f"{'held' if error is None else 'FAILED':<7} {name:<12} {seconds:6.1f} s  "
        + "  ".join(f"{key}={value}" for key, value in figures.items())
    )
    return {"name": name, "held": error is None, "error": error, "seconds": round(seconds, 2), "figures": figures}


def _markdown(figures: dict[str, Any]) -> str:
    lines = [
        f"# Checks on {figures['device']}",
        "",
        f"torch {figures['torch']}, diffusers {figures['diffusers']}, Python {figures['python']}; made by `tests/gpu/run.sh`.",
        "",
        "| section | held | seconds | figure | value |",
        "| --- | --- | --- | --- | --- |",
    ]
    for section in figures["sections"]:
        rows = list(section["figures"].items()) or [("", section["error"] or "")]
        for index, (key, value) in enumerate(rows):
            head = (section["name"], "yes" if section["held"] else "no", section["seconds"]) if index == 0 else ("", "", "")
            lines.append(f"| {head[0]} | {head[1]} | {head[2]} | {key} | {' '.join(str(value).split())} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
