"""How long small copies wait while a bulk copy from pinned memory runs on another stream of the same accelerator.

    python tests/benchmarks/copy_order.py [--mib 2048] [--device cuda]

The schedule of fetching ahead rests on it: pipelines make small copies to the device in every step (timesteps, a scheduler's
coefficients, latents), and where those queue behind the weights that are fetched ahead, a step waits for a whole component.
"""

import argparse
import json
import sys
import time

import torch

__all__ = ["measure"]

SMALL = {"pageable, 4 bytes": (4, False), "pageable, 32 KiB": (1 << 15, False), "pageable, 1 MiB": (1 << 20, False)}
SMALL |= {"pinned, 4 bytes": (4, True), "pinned, 1 MiB": (1 << 20, True)}

#: Seconds after which the bulk copy certainly runs.
_HEAD_START = 0.005


def measure(device: torch.device, *, nbytes: int, chunks: int) -> dict[str, float]:
    """Return the milliseconds of a bulk copy in so many pieces, and of each small copy that is made while it runs.

    Args:
        device: The accelerator.
        nbytes: Size of the bulk copy.
        chunks: Pieces that the bulk copy is queued in, all at once, on one stream.
    """
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    stream = torch.Stream(device)
    pairs = list(zip(target.chunk(chunks), source.chunk(chunks), strict=True))
    found: dict[str, float] = {}
    for name, (size, pinned) in {"nothing": (0, False), **SMALL}.items():
        small = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        place = torch.empty(size, dtype=torch.uint8, device=device)
        place.copy_(small)
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        with stream:
            for to, piece in pairs:
                to.copy_(piece, non_blocking=True)
        time.sleep(_HEAD_START)
        if size:
            start = time.perf_counter()
            place.copy_(small, non_blocking=True)
            torch.accelerator.current_stream(device).synchronize()
            found[name] = (time.perf_counter() - start) * 1e3
            found[f"{name}, bulk still running"] = float(not stream.query())
        torch.accelerator.synchronize(device)
        found.setdefault("bulk", (time.perf_counter() - start) * 1e3)
    return found


def main() -> None:
    """Measure whole and in pieces, and print the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--device", help="the current accelerator, if left out; sim: the simulated one")
    options = parser.parse_args()
    if options.device == "sim":
        from omni_offload.testing import sim

        sim.install(mode="threads", h2d_gbps=2.0, d2h_gbps=2.0)
    device = torch.device(options.device) if options.device else torch.accelerator.current_accelerator()
    if device is None:
        sys.exit("there is no accelerator; --device sim tries the simulated one")
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    device = torch.device(device.type, index)
    found = {f"{chunks} pieces": measure(device, nbytes=options.mib << 20, chunks=chunks) for chunks in (1, 64)}
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
