"""What leaves a pipeline: files, and copies of its components."""

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from omni_offload.testing.bench import Bench, NotRun, some
from omni_offload.testing.checks.residency import replay
from omni_offload.testing.observe import bytes_on, copied_to, same_values, tensors_in, tensors_of

__all__ = ["check_deepcopy", "check_save", "check_save_pretrained"]

_METHODS = ("save_pretrained", "from_pretrained")


def check_save(bench: Bench) -> None:
    """What is saved while enabled is what would be saved without offload: torch.save, and save_pretrained where there is one."""
    pipeline = bench.fresh()
    components = bench.components(pipeline)
    before = {path: {name: t.detach().clone() for name, t in module.state_dict().items()} for path, module in components.items()}
    saved = {path: _saved(module) for path, module in components.items() if callable(getattr(module, "save_pretrained", None))}
    with bench.enabled(pipeline):
        bench.call(pipeline)
        for path, module in components.items():
            buffer = io.BytesIO()
            torch.save(module.state_dict(), buffer)
            buffer.seek(0)
            if not same_values(torch.load(buffer, weights_only=True).values(), before[path].values()):
                bench.fail("torch.save to write the weights as they are", "others", component=path)
            if path in saved:
                _require_saved(bench, path, _saved(module), saved[path])
        bench.require_equal(bench.call(pipeline), when="after saving")


def _saved(module: Any) -> dict[str, torch.Tensor]:
    """Return what save_pretrained writes, which may name weights otherwise than the module does."""
    from safetensors.torch import load_file  # noqa: PLC0415  (whoever has save_pretrained has it)

    with tempfile.TemporaryDirectory() as folder, _quiet():
        module.save_pretrained(folder)
        saved: dict[str, torch.Tensor] = {}
        for file in Path(folder).glob("*.safetensors"):
            saved |= load_file(file)
    return saved


def _require_saved(bench: Bench, path: str, saved: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    wrong = [name for name in before.keys() | saved.keys() if name not in before or name not in saved]
    wrong += [name for name in before.keys() & saved.keys() if not same_values([saved[name]], [before[name]])]
    if wrong or not saved:
        bench.fail("save_pretrained to write the weights as they are", some(wrong) or "nothing written", component=path)


def check_save_pretrained(bench: Bench) -> None:
    """A pipeline saved in a folder while enabled and loaded from there has the same weights, and gives the same outputs, offloaded."""
    pipeline = bench.fresh()
    missing = [name for name in _METHODS if not callable(getattr(pipeline, name, None))]
    if missing:
        raise NotRun(f"the pipeline has no {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with bench.enabled(pipeline):
                bench.call(pipeline)
                with _quiet():
                    pipeline.save_pretrained(folder)
            loaded = _loaded(pipeline, folder)
        except Exception as error:
            if _cannot_be_saved(bench):
                error.add_note("it cannot be saved and loaded without offload either; if so it is, say why in the case's expected_failures")
            raise
        _take_out(bench, loaded, bench.components(pipeline))
    with bench.enabled(loaded), contextlib.redirect_stderr(io.StringIO()):  # whether a pipeline shows its progress is not saved
        bench.require_equal(bench.call(loaded), when="of what was saved while enabled and loaded again")


def _loaded(pipeline: Any, folder: str) -> Any:
    with _quiet():
        return type(pipeline).from_pretrained(folder)


def _cannot_be_saved(bench: Bench) -> bool:
    """Whether a pipeline that was never enabled cannot be saved in a folder, or not be loaded from there."""
    pipeline = bench.fresh()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _quiet():
                pipeline.save_pretrained(folder)
            _loaded(pipeline, folder)
        except Exception:  # noqa: BLE001  (whatever it is)
            return True
    return False


def _take_out(bench: Bench, loaded: Any, saved: dict[str, torch.nn.Module]) -> None:
    """Require that what was loaded has the weights that were saved, and give it memory of its own for them, in the types they had.

    They lie at odd addresses in the mapped files, where kernels may round otherwise; and which type each had is not saved.
    """
    found = bench.components(loaded)
    if found.keys() != saved.keys():
        bench.fail(f"a folder with {', '.join(saved)}", f"one with {', '.join(found)}")
    for path, module in saved.items():
        wanted, tensors = tensors_of(module), tensors_of(found[path])
        wrong = [name for name in wanted.keys() | tensors.keys() if name not in wanted or name not in tensors]
        for name in wanted.keys() & tensors.keys():
            tensors[name].data = tensors[name].detach().to(wanted[name].dtype, copy=True)
            if not same_values([tensors[name]], [wanted[name]]):
                wrong.append(name)
        if wrong:
            bench.fail("the weights that were saved to be loaded again", f"others for {some(sorted(wrong))}", component=path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the libraries say while they save and load: progress bars, and warnings of what each class does then."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def check_deepcopy(bench: Bench) -> None:
    """A deep copy of a component, made while enabled, is whole, on the host, runs its own code without any hook, and is independent."""
    pipeline = bench.fresh()
    components = bench.components(pipeline)
    with bench.enabled(pipeline) as backend:
        bench.call(pipeline)
        for target in bench.used(pipeline):
            if target.path not in components or target.path in bench.now_staying(pipeline):
                continue
            replay(bench, target, when="before a deep copy")
            twin = copy.deepcopy(components[target.path])
            backend.release()
            _require_independent(bench, target.path, target.method, components[target.path], twin)
        bench.require_equal(bench.call(pipeline), when="after deep copies")


def _require_independent(bench: Bench, path: str, method: str, original: torch.nn.Module, twin: torch.nn.Module) -> None:
    if names := bytes_on(twin, bench.device):
        bench.fail("a copy on the host", some(names), component=path)
    if not same_values(twin.state_dict().values(), original.state_dict().values()):
        bench.fail("a copy with the same values", "others", component=path)
    base = bench.allocated()
    bench.reset_peak()
    recording, cpu = bench.reference.recordings[f"{path}.{method}"], torch.device("cpu")
    with torch.no_grad():
        outputs = tensors_in(getattr(twin, method)(*copied_to(recording.args, cpu), **copied_to(recording.kwargs, cpu)))
    if any(tensor.device.type != "cpu" for tensor in outputs) or bench.peak() > base:
        bench.fail("a copy that works on the host, without any hook", f"{bench.peak() - base} bytes on the device", component=path)
    if bench.simulated and not same_values(outputs, recording.outputs):
        bench.fail("a copy that gives the same outputs", "others", component=path)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
