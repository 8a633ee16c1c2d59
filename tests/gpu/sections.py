"""The sections of the checks on a real accelerator."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import attrs
import torch
from torch import nn

from omni_offload import Lane, ModuleResidency
from omni_offload.accelerator import resolve_device
from omni_offload.testing import PipelineCase, check_pipeline

__all__ = ["SECTIONS", "Machine"]

MIB = 1 << 20
GRANULARITY = 2 * MIB  # of a caching allocator's large blocks: what a peak may be rounded up by, for each live block
QUICK_CHECKS = ("check_protocols", "check_numerics")


class Weights(nn.Module):
    """Weights of a given size in bytes, and a forward that uses them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((nbytes // 8,), 0.5), requires_grad=False)
        self.second = nn.Parameter(torch.full((nbytes // 4 - nbytes // 8,), 0.25), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.first.sum() + self.second.sum()


@attrs.frozen(kw_only=True)
class Machine:
    """The device under test.

    Attributes:
        device: With its index.
        name: As the maker calls it.
        simulated: Whether speeds mean nothing.
        quick: Whether sizes are small.
        deadline: Of everything, in `time.monotonic()` seconds.
    """

    device: torch.device
    name: str
    simulated: bool
    quick: bool
    deadline: float

    @classmethod
    def of(cls, asked: str | None, *, quick: bool, deadline: float) -> Self:
        """Return the machine of a device's name; None: of the current accelerator."""
        device = resolve_device(asked)
        torch.empty(1, pin_memory=True)  # until torch has pinned memory once, it says of none that it is pinned
        name = torch.get_device_module(device).get_device_name(device.index)
        return cls(device=device, name=str(name), simulated=device.type == "sim", quick=quick or device.type == "sim", deadline=deadline)

    def size(self, full: int, small: int) -> int:
        """Return one of two sizes."""
        return small if self.quick else full

    def synchronize(self) -> None:
        """Wait for everything that is queued."""
        torch.accelerator.synchronize(self.device)

    def clock(self, body: Callable[[], object], *, repeat: int = 3) -> float:
        """Return the shortest time (seconds) of some runs, each with the device idle before and after."""
        best = float("inf")
        for _ in range(repeat):
            self.synchronize()
            start = time.perf_counter()
            body()
            self.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    def peak_of(self, body: Callable[[], Any]) -> tuple[Any, int, int]:
        """Return what a body made, its peak on the device, and how much of that is above what was there before (bytes)."""
        self.clean_up()
        torch.accelerator.reset_peak_memory_stats(self.device)
        before = torch.accelerator.memory_allocated(self.device)
        made = body()
        self.synchronize()
        peak = torch.accelerator.max_memory_allocated(self.device)
        return made, peak, peak - before

    def clean_up(self) -> None:
        """Give back what nothing holds."""
        self.synchronize()
        gc.collect()
        torch.accelerator.empty_cache()


def pinning(machine: Machine) -> dict[str, Any]:
    """Masters are pinned at exactly their size (torch's own pinned memory is rounded up to a power of two), and unpinned at the end."""
    figures = {}
    for nbytes in (machine.size(300 * MIB, 3 * MIB) + 4, 4100):
        weights = Weights(nbytes)
        before = _host_bytes(machine)
        residency = ModuleResidency(weights, machine.device)
        residency.load()
        residency.offload()
        assert all(parameter.is_pinned() for parameter in weights.parameters()), "a master is not pinned"
        assert residency.pinned_bytes == residency.host_bytes, (residency.pinned_bytes, residency.host_bytes)
        taken = _host_bytes(machine) - before
        figures[f"pinned bytes for {nbytes}"] = residency.pinned_bytes
        figures[f"torch's pinned cache grew by, for {nbytes}"] = taken
        assert taken <= nbytes + 4096, f"{taken} bytes of pinned memory were taken for {nbytes}"
        residency.restore()
        assert not any(parameter.is_pinned() for parameter in weights.parameters()), "a weight is still pinned after restore"
        assert bool((weights.first == 0.5).all())
    return figures


def _host_bytes(machine: Machine) -> int:
    """Return the bytes of torch's own cache of pinned memory, where the device module tells."""
    stats = getattr(torch.get_device_module(machine.device), "host_memory_stats", None)
    return int(stats().get("allocated_bytes.current", 0)) if stats is not None else 0


def streams(machine: Machine) -> dict[str, Any]:
    """A copy runs beside kernels and does not keep the host; a side stream sees the weights that were loaded on another."""
    weights = Weights(machine.size(1024 * MIB, 4 * MIB))
    residency = ModuleResidency(weights, machine.device)
    residency.prepare()
    side = machine.size(8192, 64)
    matrix = torch.full((side, side), 1e-4, device=machine.device, dtype=torch.bfloat16)

    def compute(rounds: int) -> None:
        out = matrix
        for _ in range(rounds):
            out = out @ matrix

    def copy_beside(rounds: int) -> float:
        residency.drop()

        def both() -> None:
            compute(rounds)
            residency.fetch()

        return machine.clock(both, repeat=1)

    compute(1)
    copy = min(copy_beside(0) for _ in range(3))
    rounds = max(1, min(1000, round(copy / machine.clock(lambda: compute(1)))))  # kernels for about as long as the copy
    alone = machine.clock(lambda: compute(rounds))
    both = min(copy_beside(rounds) for _ in range(3))
    residency.drop()
    machine.synchronize()
    start = time.perf_counter()
    residency.fetch()
    host = time.perf_counter() - start
    expected = 0.5 * weights.first.numel() + 0.25 * weights.second.numel()
    other = torch.Stream(machine.device)
    residency.load()
    other.wait_stream(torch.accelerator.current_stream(machine.device))
    with other:
        result = weights()
    other.synchronize()
    assert abs(float(result) - expected) <= 1e-3 * expected, (float(result), expected)
    residency.restore()
    figures = {
        "kernels alone, ms": _ms(alone),
        "copy alone, ms": _ms(copy),
        "both, ms": _ms(both),
        "host busy with the copy, ms": _ms(host),
    }
    if not machine.quick:
        assert both < 0.8 * (alone + copy), f"copies do not overlap with kernels: {figures}"
        assert host < 0.25 * copy, f"the host waits for a pinned copy: {figures}"
    return figures


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def copy_speed(machine: Machine) -> dict[str, Any]:
    """How fast weights reach the device: our pinned masters, torch's pinned memory, pageable memory."""
    nbytes = machine.size(1024 * MIB, 4 * MIB)
    figures = {}
    for name, pinned in (("pinned masters", True), ("pageable masters", False)):
        residency = ModuleResidency(Weights(nbytes), machine.device, pin_memory=pinned)
        residency.prepare()
        runs = []
        for _ in range(3):
            residency.drop()
            runs.append(machine.clock(residency.fetch, repeat=1))
        figures[f"{name}, GB/s"] = round(nbytes / min(runs) / 1e9, 2)
        residency.restore()
    target = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    source = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    plain = machine.clock(lambda: target.copy_(source, non_blocking=True))
    figures["torch's pinned memory, GB/s"] = round(nbytes / plain / 1e9, 2)
    figures["a small pageable copy behind a large one, ms"] = _ms(_small_behind_large(machine, source, target))
    if not machine.quick:
        best, ours = figures["torch's pinned memory, GB/s"], figures["pinned masters, GB/s"]
        assert ours > 0.9 * best, f"registered masters are slower than torch's pinned memory: {figures}"
    return figures


def _small_behind_large(machine: Machine, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return how long (seconds) the host takes to make a tiny tensor on the device while another stream copies a large one."""
    other = torch.Stream(machine.device)
    machine.synchronize()
    with other:
        target.copy_(source, non_blocking=True)
    start = time.perf_counter()
    torch.tensor([1.0], device=machine.device)
    seconds = time.perf_counter() - start
    machine.synchronize()
    return seconds


def equality(machine: Machine) -> dict[str, Any]:
    """Offloaded runs, pinned, pageable and with a budget, make the bits of a resident run; after each call nothing is left."""
    return {name: _equal(machine, case) for name, case in _cases().items()}


def _equal(machine: Machine, case: PipelineCase) -> str:
    pipeline = case.make_pipeline()
    pipeline.to(machine.device)
    expected = _outputs(case, pipeline)
    again = _outputs(case, pipeline)
    pipeline.to("cpu")
    assert _same(expected, again), f"two resident runs of {case.name} differ: equality cannot be judged"
    budget = max(_nbytes(module) for module in pipeline.components.values() if isinstance(module, nn.Module)) * 5 // 4
    ways: list[dict[str, Any]] = [{"pin_memory": True}, {"pin_memory": False}, {"device_memory": budget}]
    for way in ways:
        machine.clean_up()
        before = torch.accelerator.memory_allocated(machine.device)
        with pipeline.enable_omni_offload(device=machine.device, **way):
            for _ in range(2):
                assert _same(expected, _outputs(case, pipeline)), f"{case.name} with {way} differs from its resident run"
                machine.synchronize()
                gc.collect()
                left = torch.accelerator.memory_allocated(machine.device) - before
                assert left <= 0, f"{left} bytes are left on the device after a call of {case.name} with {way}"
    return f"equal in {len(ways)} ways"


def peaks(machine: Machine) -> dict[str, Any]:
    """The peak is at most the largest component, or group that moves together, and the activations of a resident run."""
    case = _flux(_SMALL if machine.quick else _LARGE)
    pipeline = case.make_pipeline()
    sizes = {name: _nbytes(module) for name, module in pipeline.components.items() if isinstance(module, nn.Module)}
    pipeline.to(machine.device)
    _outputs(case, pipeline)  # libraries take their workspaces on first use
    expected, resident, activations = machine.peak_of(lambda: _outputs(case, pipeline))
    pipeline.to("cpu")
    figures: dict[str, Any] = {"weights, MiB": _mib(sum(sizes.values())), "resident peak, MiB": _mib(resident)}
    with pipeline.enable_omni_offload(device=machine.device) as backend:
        start = time.perf_counter()
        made, peak, _ = machine.peak_of(lambda: _outputs(case, pipeline))
        figures["offloaded peak, MiB"] = _mib(peak)
        figures["offloaded, s"] = round(time.perf_counter() - start, 3)
        figures["weights moved, MiB"] = _mib(backend.report().totals["bytes_in"])
        assert backend.report().totals["bytes_out"] == 0, "weights that nobody wrote were copied back"
    assert _same(expected, made), "the offloaded run differs from the resident one"
    groups = [*((name,) for name in sizes), *pipeline._co_resident_modules]
    bound = (
        max(sum(sizes[name] for name in group) for group in groups) + activations + (MIB // 16 if machine.simulated else 4 * GRANULARITY)
    )
    figures["bound, MiB"] = _mib(bound)
    assert peak <= bound, f"the peak is {peak}, more than {bound}"
    return figures


def recording(machine: Machine) -> dict[str, Any]:
    """A recorded call in layer mode tells of every copy, in times that the link can have, and of what the device held."""
    case = _flux(_SMALL if machine.quick else _LARGE)
    pipeline = case.make_pipeline()
    with pipeline.enable_omni_offload("layer", device=machine.device) as backend:
        expected = _outputs(case, pipeline)
        plain = machine.clock(lambda: _outputs(case, pipeline), repeat=1)
        before = backend.report().totals["bytes_in"]
        start = time.perf_counter()
        with backend.record() as record:
            made = _outputs(case, pipeline)
        seconds = time.perf_counter() - start
        report = backend.report()
    assert _same(expected, made), "the recorded run differs from the one before"
    assert record.clock == "events on the device", record.clock
    copies = record.lane(Lane.COPY_IN)
    moved = sum(span.nbytes for span in copies)
    busy = {lane: sum(span.seconds for span in record.lane(lane)) for lane in (Lane.COMPUTE, Lane.WAIT, Lane.COPY_IN, Lane.CALL)}
    figures = {
        "call, ms": _ms(plain),
        "recorded call, ms": _ms(seconds),
        "of it by the device's events, ms": _ms(busy[Lane.CALL]),
        "computing, ms": _ms(busy[Lane.COMPUTE]),
        "waits for copies, ms": _ms(busy[Lane.WAIT]),
        "copies, ms": _ms(busy[Lane.COPY_IN]),
        "copies": len(copies),
        "copied, MiB": _mib(moved),
        "peak of the residency curve, MiB": _mib(record.peak),
    }
    assert moved == report.totals["bytes_in"] - before, figures
    assert record.peak <= report.peak_device_bytes, figures
    assert record.held[-1].nbytes == 0, figures
    times = [held.start for held in record.held]
    assert times == sorted(times), "marks of the host are not in its order"
    assert 0.5 * seconds <= busy[Lane.CALL] <= 1.01 * seconds, figures
    assert all(span.end <= record.seconds for span in record.spans), figures
    return figures


def contract(machine: Machine) -> dict[str, Any]:
    """The contract holds for a pipeline with one DiT and for one that makes videos."""
    figures: dict[str, Any] = {}
    failures = []
    for name, case in _cases().items():
        if time.monotonic() > machine.deadline:
            figures[name] = "not run: no time left"
            continue
        report = check_pipeline(case, device=machine.device, checks=QUICK_CHECKS if machine.quick else None)
        counts: dict[str, int] = {}
        for result in report.results:
            counts[result.outcome.value] = counts.get(result.outcome.value, 0) + 1
        figures[name] = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        failures += [f"{name}: {result.check}: {result.reason}" for result in report.failures]
    assert not failures, "; ".join(failures)
    return figures


def _cases() -> dict[str, PipelineCase]:
    from pipelines.flux.cases import FLUX
    from pipelines.wan.cases import WAN_2_1

    return {"flux": FLUX, "wan": WAN_2_1}


@attrs.frozen(kw_only=True)
class _Shape:
    """Sizes of a Flux pipeline."""

    double: int
    single: int
    heads: int
    axes: tuple[int, int, int]
    text_width: int
    text_layers: int


_LARGE = _Shape(double=4, single=8, heads=16, axes=(16, 56, 56), text_width=1024, text_layers=24)  # 2.1 and 1.4 GiB in bfloat16
_SMALL = _Shape(double=1, single=1, heads=2, axes=(4, 6, 6), text_width=64, text_layers=2)


def _flux(shape: _Shape) -> PipelineCase:
    """Return Flux with a DiT and a T5 encoder of given sizes, random weights in bfloat16."""
    from diffusers import FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    from pipelines.flux.cases import FLUX
    from pipelines.tiny.components import TEXT_WIDTH
    from pipelines.tiny.tokenizers import T5_VOCABULARY_SIZE

    def make_pipeline() -> Any:
        pipeline = FLUX.make_pipeline()
        with torch.device("meta"):
            transformer = FluxTransformer2DModel(
                patch_size=1,
                in_channels=16,
                num_layers=shape.double,
                num_single_layers=shape.single,
                attention_head_dim=sum(shape.axes),
                num_attention_heads=shape.heads,
                joint_attention_dim=shape.text_width,
                pooled_projection_dim=TEXT_WIDTH,
                guidance_embeds=True,
                axes_dims_rope=shape.axes,
            )
            encoder = T5EncoderModel(
                T5Config(
                    vocab_size=T5_VOCABULARY_SIZE,
                    d_model=shape.text_width,
                    d_kv=64,
                    d_ff=8 * shape.text_width,
                    num_layers=shape.text_layers,
                    num_heads=max(1, shape.text_width // 64),
                    feed_forward_proj="gated-gelu",
                )
            )
        pipeline.transformer, pipeline.text_encoder_2 = _filled(transformer), _filled(encoder)
        for module in (pipeline.vae, pipeline.text_encoder):
            module.to(torch.bfloat16)
        return pipeline

    return PipelineCase(name="bfloat16 flux", make_pipeline=make_pipeline, make_inputs=FLUX.make_inputs, outputs=FLUX.outputs)


def _filled(model: Any) -> Any:
    """Give a model on the meta device random weights, cheaply: one row, repeated."""
    model.to(torch.bfloat16).to_empty(device="cpu")
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # of transformers' models
    for index, parameter in enumerate(model.parameters()):
        row = torch.randn(parameter.shape[-1:], generator=torch.Generator().manual_seed(index)) * 0.02
        parameter.data.copy_(row.expand(parameter.shape))
    assert not list(model.buffers()), "a buffer would stay without values"
    return model.eval().requires_grad_(requires_grad=False)


def _outputs(case: PipelineCase, pipeline: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [output.detach().to("cpu", copy=True) for output in case.outputs(pipeline(**case.make_inputs(pipeline)))]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _nbytes(module: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _mib(nbytes: int) -> float:
    return round(nbytes / MIB, 2)


SECTIONS: Mapping[str, Callable[[Machine], dict[str, Any]]] = {
    "pinning": pinning,
    "streams": streams,
    "copy speed": copy_speed,
    "equality": equality,
    "peaks": peaks,
    "recording": recording,
    "contract": contract,
}
