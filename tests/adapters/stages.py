"""Plays edits on a pipeline, offloaded or resident, and returns what every call made."""

import contextlib
import functools
import gc
import re
from types import SimpleNamespace

import pytest
import torch
from weight_edits import EDITS, LIVES, NOT_WITHIN

from omni_offload import ModuleResidency, resolve_offload_plan
from omni_offload.config import make_config
from omni_offload.errors import OffloadConfigError
from omni_offload.testing import sim
from pipelines.flux.cases import FLUX
from pipelines.stable_diffusion.cases import TEXT_TO_IMAGE
from pipelines.wan.cases import WAN_2_1

CASES = {"flux": FLUX, "wan": WAN_2_1, "sd": TEXT_TO_IMAGE}
MOMENTS = ("before", "enabled", "between", "within", "after")

#: Selector keys. Numbers of bytes by name: "tight" stands for those of the largest component, adapters included, "ample" for those of
#: all of them, "streaming" for the least that streaming takes, adapters included.
WHOLE = {
    "plain": {},
    "pageable": {"pin_memory": False},
    "tight": {"device_memory": "tight"},
    "kept": {"device_memory": "ample", "keep_between_calls": True},
    "kept pageable": {"device_memory": "ample", "keep_between_calls": True, "pin_memory": False},
}
LAYERS = {
    "layers": {"config": "layer"},
    "layers half resident": {"config": "layer", "layer_options": {"dit": {"resident_layers": 2}}},
    "layers pageable": {"config": "layer", "slots": 2, "pin_memory": False},
    "layers tight": {"config": "layer", "device_memory": "streaming"},
    "layers kept": {"config": "layer", "keep_between_calls": True, "slots": 2, "layer_options": {"dit": {"resident_layers": 2}}},
}
SETTINGS = WHOLE | LAYERS


class Stage:
    """One pipeline in its life.

    Args:
        case: The pipeline's case.
        device: The accelerator.
    """

    def __init__(self, case, device):
        self.case, self.device, self.pipe = case, device, case.make_pipeline()
        self.extra, self.outputs, self.most, self.all, self.least = {}, [], 0, 0, 0
        self.backend = None

    def change(self, edit):
        """Make an edit, part by part: what is loaded by one and unloaded by the next needs room between them."""
        if parts := getattr(edit, "parts", ()):
            for part in parts:
                self.change(part)
            return
        self.measure()
        self.extra.update(edit(self.pipe) or {})
        self.measure()

    def call(self, within=None):
        """Run one call; `within` is an edit that is made after its first step."""
        inputs = self.case.make_inputs(self.pipe) | self.extra
        if within is not None:
            inputs["callback_on_step_end"] = lambda _pipe, step, _time, kwargs: (self.change(within) if step == 0 else None, kwargs)[1]
        with torch.no_grad():
            outputs = self.case.outputs(self.pipe(**inputs))
        self.outputs.append([tensor.detach().to("cpu", copy=True) for tensor in outputs])
        self.look()

    def parts(self):
        return {name: part for name, part in self.pipe.components.items() if isinstance(part, torch.nn.Module)}

    def measure(self):
        """Note the bytes that components take, and the least that streaming takes."""
        if self.backend is None:
            sizes = [ModuleResidency(part, self.device, pin_memory=False).padded_bytes for part in self.parts().values()]
            self.most, self.all = max(self.most, *sizes), max(self.all, sum(sizes))
            self.least = max(self.least, least_bytes(self.pipe, self.device))

    def look(self):
        """Resident: note the bytes of components. Offloaded: nothing is left, and everything is managed."""
        if self.backend is None:
            self.measure()
            return
        pipe, backend = self.pipe, self.backend
        assert pipe.offload_backend is backend
        assert pipe._execution_device == backend.device == self.device
        tensors = {name: [*part.parameters(), *part.buffers()] for name, part in self.parts().items()}
        assert {t.device.type for found in tensors.values() for t in found} == {"cpu"}
        counted = {c.name: c.weight_bytes for c in backend.report().components}
        assert counted == {c.path: c.weight_bytes for c in resolve_offload_plan(pipe, make_config("module")).components}
        gc.collect()
        torch.accelerator.synchronize(self.device)
        held = sum(c.resident_bytes for c in backend.report().components)
        if backend.config.keep_between_calls:
            assert held <= (backend.config.device_memory or held)
        else:
            assert held == 0

    def weights(self):
        named = {f"{part}.{name}": t for part, module in self.parts().items() for name, t in module.state_dict().items()}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}

    @contextlib.contextmanager
    def on_device(self, settings):
        """Enable offload, or (None) bring the pipeline to the device; and back."""
        if settings is None:
            self.pipe.to(self.device)
            yield
            self.pipe.to("cpu")
            return
        with self.pipe.enable_omni_offload(device=self.device, **settings) as self.backend:
            yield
        assert self.pipe.offload_backend is None
        self.backend = None


def least_bytes(pipe, device):
    """Return the least budget under which a pipeline streams."""
    with pytest.raises(OffloadConfigError) as error:
        pipe.enable_omni_offload("layer", device=device, device_memory=64)
    return int(re.search(r"needs (\d+)", str(error.value))[1])


def _moment(family, name, moment, device, settings):
    edit, stage = next(edit for edit in EDITS if edit.name == name), Stage(CASES[family], device)
    if edit.setup is not None:
        stage.change(edit.setup)
    if moment == "before":
        stage.change(edit.edit)
    with stage.on_device(settings):
        if moment == "enabled":
            stage.change(edit.edit)
        stage.call(within=edit.edit if moment == "within" else None)
        if moment == "between":
            stage.change(edit.edit)
        stage.call()
        stage.call()
    if moment == "after":
        stage.change(edit.edit)
    stage.call()
    return stage


def _life(family, name, where, device, settings):
    stage = Stage(CASES[family], device)
    with stage.on_device(settings):
        stage.call()
        for edit in LIVES[name][1]:
            within = where == "within" and edit not in NOT_WITHIN
            if not within:
                stage.change(edit)
            stage.call(within=edit if within else None)
    stage.call()
    return stage


@functools.cache
def _resident(play, family, name, moment, device):
    stage = play(family, name, moment, device, None)
    return SimpleNamespace(
        outputs=stage.outputs, weights=stage.weights(), sizes={"tight": stage.most, "ample": stage.all, "streaming": stage.least}
    )


def same(play, family, name, moment, device, setting):
    """Play on a pipeline offloaded so, and require what a resident one makes with the same calls."""
    twin = _resident(play, family, name, moment, device)
    keys = {key: twin.sizes.get(value, value) if isinstance(value, str) else value for key, value in SETTINGS[setting].items()}
    stage = play(family, name, moment, device, keys)
    for number, (got, wanted) in enumerate(zip(stage.outputs, twin.outputs, strict=True)):
        assert all(map(torch.equal, got, wanted)), f"call {number}"
    weights = stage.weights()
    assert weights.keys() == twin.weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, twin.weights[name])] == []
    return twin


def moment(*cell):
    return same(_moment, *cell)


def life(*cell):
    return same(_life, *cell)


def held():
    gc.collect()
    torch.accelerator.synchronize(torch.device("sim", 0))
    return sim.allocated()
