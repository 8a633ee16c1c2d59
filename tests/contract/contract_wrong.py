"""Deliberately wrong pipelines: each breaks one rule in a way that an author might, and the check of that rule finds it."""

import contextlib
import inspect
import sys
import threading
from pathlib import Path

import attrs
import torch
from contract_tiny import WIDTH, Adapting, Autoencoder, Base, Denoiser, HandWritten, Hook, Saving, Tiny, case_of
from torch import nn

from omni_offload import HookRegistry, OffloadPlan, OmniOffloadMixin
from omni_offload.config import parse_bytes
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.testing import all_checks

WRONG = []


def wrong(check, mode="module", **also):
    """Register a wrong pipeline for a check in a mode, with the other checks that it fails too and the reasons."""

    def register(cls):
        cls.check, cls.mode, cls.also = check, mode, also
        WRONG.append(cls)
        return cls

    return register


CHECKS = tuple(check.__name__.removeprefix("check_") for check in all_checks())

#: Checks that are not run in mode `module`.
OF_LAYER_MODE = ("slots", "residents", "block_order", "block_report")


def of(reason, *names):
    """Return some checks with one reason."""
    return {f"check_{name}": reason for name in names}


def refused(own, *passing):
    """Return all checks but the class's own, and those that need no call, or none that goes well."""
    return of(
        "the pipeline cannot be enabled, or not called",
        *(name for name in CHECKS if name not in (own, "adapters", "save_pretrained", *OF_LAYER_MODE, *passing)),
    )


def repairs(reason, *, call=True):
    """Return the checks that compare everything after an interrupt."""
    return of(reason, "interrupted_enable", "interrupted_disable", *(("interrupted_call",) if call else ()))


def ends(reason):
    """Return the checks that compare everything after disable."""
    names = ("enable_from_device", "inference_modes", "unselected_stay", "ties", "shared_weight", "replaced_component", "shared_component")
    return {**of(reason, *names), **repairs(reason)}


CALLING_TWICE = tuple(
    f"check_{name}"
    for name in (
        *("numerics_on_least_budget", "keep_between_calls", "budget", "buffers", "shared_weight", "save", "deepcopy"),
        *(
            "edits",
            "edits_within_calls",
            "structure",
            "casts",
            "replaced_component",
            "shared_component",
            "failing_uses",
            "failing_callback",
            "failing_loads",
        ),
        *("failing_activations", "interrupted_call", "threads", "streams", "races", "repeated_calls", "host_budget", "casts_within_calls"),
    )
)


class Switched(Tiny):
    """Does something of its own after enabling and before disabling."""

    def enable_omni_offload(self, *args, **kwargs):
        backend = super().enable_omni_offload(*args, **kwargs)
        self.switched_on(backend)
        return backend

    def disable_omni_offload(self):
        if self.offload_backend is not None:
            self.switched_off()
        super().disable_omni_offload()

    def switched_on(self, backend):
        """Run when enabled, each time it is asked for."""

    def switched_off(self):
        """Run before it is disabled."""


# ---- declarations ------------------------------------------------------------------------------------------------------------


@wrong("check_case", **of("nothing tells whether outputs depend on weights", "edits", "edits_within_calls"))
class ReturnsNothing(Tiny):
    """Its case compares no tensor."""

    fields = {"outputs": lambda _: []}


@wrong("check_protocols")
class AsksForMoreToDisable(Tiny):
    """Its disable wants an argument."""

    def disable_omni_model_cpu_offload(self, how):
        super().disable_omni_model_cpu_offload()


@wrong("check_discovery", **refused("discovery", "protocols"))
class ForgetsAComponent(Tiny):
    """A component with parameters is in none of its lists."""

    _vae_modules = []
    _offload_entry_points = {}


@wrong("check_discovery", **refused("discovery", "protocols"))
class NamesAPathThatIsNotThere(Tiny):
    """A list names a component that does not exist."""

    _dit_modules = ["transformer", "transfromer_2"]


@wrong("check_plan")
class NamesBlocksThatAreNotThere(Tiny):
    """Its plan names a block container that does not exist."""

    _offload_plan = OffloadPlan(block_attrs={"transformer": ("layers",)})


@wrong("check_signatures", check_deepcopy="the wrapper calls the original's method, in copies too")
class WrapsWithoutASignature(Switched):
    """Puts a wrapper around a method, which hides its signature."""

    def switched_on(self, backend):
        if "decode" in vars(self.vae) and vars(self.vae)["decode"] is not getattr(self, "wrapper", None):
            inner = self.vae.decode
            self.inner, self.wrapper = inner, lambda *args: inner(*args)  # noqa: PLW0108
            vars(self.vae)["decode"] = self.wrapper

    def switched_off(self):
        if "inner" in vars(self):
            vars(self.vae)["decode"] = vars(self).pop("inner")
            del self.wrapper


# ---- lifecycle ---------------------------------------------------------------------------------------------------------------


@wrong("check_round_trip", **repairs("the attribute is left there too", call=False))
class LeavesAnAttribute(Switched):
    """Leaves its notes on a component."""

    def switched_on(self, backend):
        self.transformer._notes = "enabled"


@wrong("check_round_trip", **ends("strides are compared there too"), check_structure="strides are compared there too")
class LosesStrides(Switched):
    """Disable makes weights contiguous."""

    def __init__(self):
        super().__init__()
        self.vae.decoder.weight = nn.Parameter(self.vae.decoder.weight.detach().T.contiguous().T)

    def disable_omni_offload(self):
        super().disable_omni_offload()
        self.vae.decoder.weight.data = self.vae.decoder.weight.data.contiguous()


@wrong("check_identity", check_inference_modes="torch refuses to make parameters of inference tensors")
class ReplacesParametersWithinUses(Tiny):
    """Runs its DiT on copies of the parameters: other objects."""

    def denoise(self, *args, **kwargs):
        if self.offload_backend is None:
            return super().denoise(*args, **kwargs)
        handle = self.transformer.blocks[2].register_forward_pre_hook(self.replace)
        after = self.transformer.blocks[2].register_forward_hook(self.put_back, prepend=False)
        try:
            return super().denoise(*args, **kwargs)
        finally:
            handle.remove()
            after.remove()

    def replace(self, module, _):
        self.kept = module.weight
        module._parameters["weight"] = nn.Parameter(module.weight.detach())

    def put_back(self, module, *_):
        module._parameters["weight"] = self.kept
        del self.kept


@wrong("check_identity", check_round_trip="objects are compared there too", **ends("objects are compared there too"))
class ReplacesParameters(Switched):
    """Disable gives the components new parameters."""

    def disable_omni_offload(self):
        super().disable_omni_offload()
        self.vae.decoder._parameters["weight"] = nn.Parameter(self.vae.decoder.weight.detach().clone())


@wrong("check_idempotence")
class EnablesAnew(Tiny):
    """Enabling again gives up the former offload, whatever was asked for."""

    def enable_omni_offload(self, *args, **kwargs):
        self.disable_omni_offload()
        return super().enable_omni_offload(*args, **kwargs)


@wrong("check_cycles", check_user_hooks="it calls after disable too")
class KeepsATableOnTheDevice(Tiny):
    """A table made for the first call stays on its device, also after disable."""

    table = None

    def denoise(self, latents, *args, **kwargs):
        if self.table is None:
            self.table = torch.ones(latents.shape, device=latents.device, dtype=latents.dtype)
        return super().denoise(latents * self.table, *args, **kwargs)


@wrong("check_repeated_calls")
class KeepsEveryLatent(Tiny):
    """Keeps what each call began with."""

    kept = ()

    def denoise(self, latents, *args, **kwargs):
        self.kept = (*self.kept, latents.cpu())
        return super().denoise(latents, *args, **kwargs)


@wrong("check_enable_from_device", check_rollback="it enables a pipeline on the device too")
class WantsWeightsOnTheHost(Tiny):
    """Refuses weights that are on the device."""

    def enable_omni_offload(self, *args, **kwargs):
        if self.transformer.blocks[0].weight.device.type != "cpu" and self.offload_backend is None:
            raise ValueError("move the weights to the host first")
        return super().enable_omni_offload(*args, **kwargs)


@wrong("check_execution_device", check_second_device="without an index it is the first device")
class LosesTheIndex(Tiny):
    """Its execution device has no index."""

    @property
    def _execution_device(self):
        return torch.device(super()._execution_device.type)


@wrong("check_second_device")
class NamesDeviceZero(Tiny):
    """Makes its latents on the first device, whichever is asked for."""

    def denoise(self, latents, *args, **kwargs):
        device = latents.device
        return super().denoise(latents.to(device if device.type == "cpu" else f"{device.type}:0"), *args, **kwargs)


@wrong("check_inference_modes")
class WritesToWhatItMade(Tiny):
    """Counts its steps in a tensor that it made where the pipeline was created."""

    def __init__(self):
        super().__init__()
        self.steps = torch.zeros(())

    def denoise(self, *args, **kwargs):
        self.steps.add_(1)
        return super().denoise(*args, **kwargs)


# ---- numerics ----------------------------------------------------------------------------------------------------------------


class Counts(Switched):
    """Knows how it was enabled, and how many calls there were since."""

    count = 0
    pinned = None

    def switched_on(self, backend):
        if self.pinned is None:
            self.count, self.pinned = 0, backend.config.pin_cpu_memory

    def switched_off(self):
        self.__dict__.pop("pinned", None)
        self.__dict__.pop("count", None)

    def is_off(self):
        raise NotImplementedError

    def denoise(self, latents, *args, **kwargs):
        if self.pinned is not None:
            self.count += 1
        return super().denoise(latents + 1e-3 if self.pinned is not None and self.is_off() else latents, *args, **kwargs)


@wrong("check_numerics", **dict.fromkeys(CALLING_TWICE, "it calls twice while pinned"))
class ChangesWithEachCall(Counts):
    """The second call with pinned weights gives another output."""

    def is_off(self):
        return self.pinned and self.count > 1


@wrong("check_numerics_unpinned", **of("it calls with unpinned weights too", "ties", "edits", "structure", "races"))
class RoundsUnpinned(Counts):
    """With unpinned weights the output is another."""

    def is_off(self):
        return not self.pinned


@wrong("check_numerics_on_least_budget")
class WantsRoomForAll(Tiny):
    """Refuses a budget that does not hold all components at once."""

    def enable_omni_offload(self, config, **kwargs):
        wanted = sum(t.numel() * t.itemsize for part in self.parts().values() for t in part.parameters())
        if config.device_memory is not None and config.device_memory < wanted:
            raise OffloadConfigError("all components have to fit")
        return super().enable_omni_offload(config, **kwargs)


@wrong("check_streams", check_races="races in other checks count")
class WaitsForTheDefaultStreamOnly(HandWritten):
    """What it computes on a stream of its own is waited for by the default stream only."""

    def denoise(self, latents, *args, **kwargs):
        if latents.device.type == "cpu":
            return super().denoise(latents, *args, **kwargs)
        home = torch.accelerator.current_stream(latents.device)
        side = torch.Stream(latents.device)
        side.wait_stream(home)
        with side:
            latents = latents + 0
        if home.stream_id == 0:
            home.wait_stream(side)
        self.kept = latents
        return super().denoise(latents, *args, **kwargs)


@wrong("check_races", check_streams="no race may be found there either")
class ForgetsToWait(Tiny):
    """Copies on a stream of its own, and nobody waits."""

    def denoise(self, latents, *args, **kwargs):
        if latents.device.type == "cpu":
            return super().denoise(latents, *args, **kwargs)
        side = torch.Stream(latents.device)
        host = latents.new_ones(latents.shape, device="cpu").pin_memory()
        side.wait_stream(torch.accelerator.current_stream(latents.device))
        with side:
            scale = torch.empty_like(latents)
            scale.copy_(host, non_blocking=True)
        return super().denoise(latents * scale, *args, **kwargs)


# ---- residency and memory ----------------------------------------------------------------------------------------------------


@wrong("check_residency", check_peak="all are there at once", check_stray_use="all are there at once, so that no use is stray")
class NeverEvicts(HandWritten):
    """Components stay until the call ends."""

    def enter(self, path):
        self.residencies[path].load()


@wrong("check_entry_points", **of("it uses a component twice outside of calls", "release", "state_dict", "deepcopy", "failing_uses"))
class AlignsOnlyOnce(HandWritten):
    """Aligns the inputs of a component's first use only."""

    aligned = frozenset()

    def align(self, path, value):
        return value if path in self.aligned else super().align(path, value)

    def leave(self, path):
        self.aligned |= {path}
        super().leave(path)

    def forget(self):
        super().forget()
        self.__dict__.pop("aligned", None)


@wrong(
    "check_entry_points",
    **refused("entry_points", "protocols", "case", "discovery", "plan", "signatures", "release", "rollback", "autograd", "stray_use"),
)
class ForgetsDecode(Tiny):
    """The method that the call ends with is no declared entry point."""

    _offload_entry_points = {"": ("encode_prompt",)}


class Considerate(Autoencoder):
    """Brings its input to where its weights are."""

    def decode(self, latents):
        return super().decode(latents.to(self.decoder.weight.device))


@wrong("check_work_on_device", check_shared_weight="it is looked at within decode, which is no use")
class DecodesOnTheHost(Tiny):
    """The method that the call ends with is no declared entry point, and moves its input to the weights on the host."""

    _offload_entry_points = {"": ("encode_prompt",)}

    def __init__(self):
        super().__init__()
        self.vae = Considerate().eval()


@wrong(
    "check_captured_methods",
    check_deepcopy="the wrapper calls the original's method, in copies too",
    check_autograd="the refusal's traceback holds the input that it moved",
)
class MovesForEver(Switched):
    """Its wrapper of a method sends the input to the device, also where somebody kept it and offload is disabled."""

    def switched_on(self, backend):
        if "inner" not in vars(self):
            inner = self.inner = self.vae.decode

            def decode(latents):
                return inner(latents.to(backend.device))

            vars(self.vae)["decode"] = decode

    def switched_off(self):
        if "inner" in vars(self):
            vars(self.vae)["decode"] = vars(self).pop("inner")


@wrong("check_release", **of("it releases too", "on_device", "keep_between_calls", "failing_uses"))
class KeepsWhatIsReleased(Switched):
    """release() does nothing."""

    def switched_on(self, backend):
        backend.release = lambda: None


@wrong("check_on_device")
class HasNothingOnDevice(Tiny):
    """on_device() does nothing."""

    def on_device(self, *components):
        return contextlib.nullcontext()


@wrong("check_unselected_stay")
class RotatesEverything(HandWritten):
    """Takes no notice of which components were selected."""

    def take_over(self):
        self.rotating = set(self.residencies)
        super().take_over()


@wrong("check_keep_between_calls")
class KeepsNothing(Tiny):
    """Takes no notice of keep_between_calls."""

    def enable_omni_offload(self, config, **kwargs):
        return super().enable_omni_offload(attrs.evolve(config, keep_between_calls=False), **kwargs)


@wrong("check_peak")
class LoadsBeforeItEvicts(HandWritten):
    """The next component comes before the last has left."""

    def enter(self, path):
        self.residencies[path].load()
        self.evict(but=path)


@wrong("check_budget")
class DoublesTheBudget(Tiny):
    """Takes twice the device memory that it was given."""

    def enable_omni_offload(self, config, **kwargs):
        if config.device_memory is not None:
            config = attrs.evolve(config, device_memory=2 * parse_bytes(config.device_memory))
        return super().enable_omni_offload(config, **kwargs)


@wrong("check_host_budget")
class IgnoresHostMemory(Tiny):
    """Pins all that there is."""

    def enable_omni_offload(self, config, **kwargs):
        return super().enable_omni_offload(attrs.evolve(config, host_memory=None), **kwargs)


@wrong("check_traffic")
class CopiesBack(HandWritten):
    """Copies weights back that nobody wrote."""

    def evict(self, but=None):
        for path, residency in self.residencies.items():
            if path != but and path in self.rotating and residency.loaded:
                for parameter in self.originals[path].parameters():
                    parameter.to("cpu")
        super().evict(but)


@wrong("check_report")
class ReportsNothing(Switched):
    """Its report has no components."""

    def switched_on(self, backend):
        backend.report = lambda: attrs.evolve(type(backend).report(backend), components=())


@wrong("check_report")
class ReportsHalfOfTheCopies(Switched):
    """Its report tells half of the bytes that were copied."""

    def switched_on(self, backend):
        def report():
            whole = type(backend).report(backend)
            return attrs.evolve(whole, components=tuple(attrs.evolve(c, bytes_in=c.bytes_in // 2) for c in whole.components))

        backend.report = report


# ---- weights -----------------------------------------------------------------------------------------------------------------


class Resets(HandWritten):
    """Puts tensors back to what they were when their component came."""

    def chosen(self, module):
        raise NotImplementedError

    def enter(self, path):
        if not self.residencies[path].loaded:
            self.__dict__.setdefault("kept", {})[path] = [(t, t.detach().clone()) for t in self.chosen(self.originals[path])]
        super().enter(path)

    def evict(self, but=None):
        loaded = [path for path, residency in self.residencies.items() if residency.loaded and path != but]
        super().evict(but)
        for path in loaded:
            for tensor, value in self.__dict__.get("kept", {}).pop(path, ()):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(value)

    def leave(self, path):
        if not self.calls:
            self.evict()

    def forget(self):
        super().forget()
        self.__dict__.pop("kept", None)


@wrong("check_buffers")
class ResetsBuffers(Resets):
    """Buffers are as they were at each use."""

    def chosen(self, module):
        return [t for t in module.buffers() if not t.is_inference()]


@wrong("check_written_weights", **of("what is cast or edited in a use is written in it", "casts_within_calls", "edits_within_calls"))
class ResetsWeights(Resets):
    """Writes to weights are lost."""

    def chosen(self, module):
        return [t for t in module.parameters() if not t.is_inference()]


@wrong("check_ties")
class TearsTies(HandWritten):
    """Within a use, tensors that share memory have memory of their own."""

    def enter(self, path):
        super().enter(path)
        self.torn = []
        seen = set()
        part = self.originals[path]
        for tensor in (*part.parameters(), *part.buffers()):
            if tensor.data_ptr() in seen:
                self.torn.append((tensor, tensor.data))
                tensor.data = tensor.data.clone()
            seen.add(tensor.data_ptr())

    def evict(self, but=None):
        for tensor, data in self.__dict__.pop("torn", ()):
            tensor.data = data
        super().evict(but)

    def leave(self, path):
        if not self.calls:
            self.evict()


@wrong("check_shared_weight")
class MovesEachWeightOnce(Tiny):
    """A weight that another component holds too is put back on the host where that one is not in use."""

    def denoise(self, *args, **kwargs):
        shared = {id(p) for p in self.text_encoder.parameters()} & {id(p) for p in self.vae.parameters()}
        if shared and self.offload_backend is not None:
            raise OffloadStateError("a weight of the VAE is not there")
        return super().denoise(*args, **kwargs)


@wrong(
    "check_state_dict",
    check_deepcopy="a copy has the device's tensors",
    **of("release() meets a component that is bound", "release", "failing_uses"),
)
class LeavesWeightsBound(HandWritten):
    """A component that was used outside of a call stays bound to the device until another is used."""

    def leave(self, path):
        """Stays."""


class SavesZeros(Autoencoder):
    """Saves zeros while it is hooked."""

    def save_pretrained(self, folder):
        if HookRegistry.find(self) is None:
            super().save_pretrained(folder)
            return
        former = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        for parameter in self.parameters():
            parameter.data.zero_()
        super().save_pretrained(folder)
        self.load_state_dict(former)


@wrong("check_save")
class SavesWrongly(Tiny):
    """What is saved while enabled is not what there is."""

    def __init__(self):
        super().__init__()
        self.vae = SavesZeros().eval()


@wrong("check_save_pretrained")
class SavesInHalf(Saving):
    """A folder that it is saved in while enabled holds weights of half the precision."""

    def save_pretrained(self, folder):
        super().save_pretrained(folder)
        for path in Path(folder).glob("*.pt") if self.offload_backend is not None else ():
            torch.save({name: tensor.half() for name, tensor in torch.load(path).items()}, path)


@wrong("check_save_pretrained")
class ForgetsASettingInTheFolder(Saving):
    """It loads the weights, and not what it was told of them: outputs are others."""

    strength = 1.0

    def denoise(self, latents, text, callback=None, steps=3):
        return super().denoise(latents, text * self.strength, callback, steps)

    @classmethod
    def from_pretrained(cls, folder):
        pipeline = super().from_pretrained(folder)
        pipeline.strength = 0.5
        return pipeline


@wrong("check_save_pretrained")
class LoadsWithoutAComponent(Saving):
    """What is loaded lacks a component."""

    @classmethod
    def from_pretrained(cls, folder):
        pipeline = super().from_pretrained(folder)
        pipeline.vae = nn.Identity()
        return pipeline


@wrong("check_deepcopy")
class CopiesTheHook(Switched):
    """A copy of a component runs the original's code."""

    def switched_on(self, backend):
        if "wrapped" not in vars(self):
            inner = self.transformer.forward
            self.wrapped = inner

            def forward(x, text):
                return inner(x, text)

            forward.__signature__ = inspect.signature(inner)
            vars(self.transformer)["forward"] = forward

    def switched_off(self):
        if "wrapped" in vars(self):
            vars(self.transformer)["forward"] = vars(self).pop("wrapped")


# ---- changes -----------------------------------------------------------------------------------------------------------------


@wrong("check_edits", **of("it changes the encoder too", "edits_within_calls", "structure", "casts"))
class RemembersPrompts(Tiny):
    """Keeps what the encoder made of a prompt, whatever becomes of the encoder."""

    def encode_prompt(self, ids):
        if self.offload_backend is None:
            return super().encode_prompt(ids)
        if "remembered" not in vars(self):
            self.remembered = super().encode_prompt(ids).cpu()
        return self.remembered.to(self._execution_device)


@wrong("check_edits_within_calls")
class UndoesEditsOfCallbacks(Tiny):
    """Puts the weights of its DiT back to what they were before a callback."""

    def denoise(self, latents, text, callback=None, steps=3):
        def guarded(*args):
            known = {name: tensor.clone() for name, tensor in self.transformer.state_dict().items()}
            callback(*args)
            self.transformer.load_state_dict(known)

        hidden = callback is not None and self.offload_backend is not None
        return super().denoise(latents, text, guarded if hidden else callback, steps)


class RemembersBlocks(Denoiser):
    """Keeps the blocks that it ran with first."""

    def forward(self, x, text):
        kept = self.__dict__.setdefault("kept", tuple(self.blocks))
        for block in kept:
            x = x + torch.tanh(block(x + text))
        return x


@wrong("check_structure")
class RemembersStructure(Tiny):
    """Runs the blocks that it found in its first call."""

    def __init__(self):
        super().__init__()
        self.transformer = RemembersBlocks().eval()


@wrong("check_casts")
class CastsBack(HandWritten):
    """Loads every component in the type that it had when offload was enabled."""

    def enter(self, path):
        if not self.residencies[path].loaded:
            self.originals[path].to(torch.float32)
        super().enter(path)


@wrong("check_adapters")
class FusesTwice(Adapting):
    """While offload is enabled an adapter is fused into the weights once more at each call."""

    def denoise(self, *args, **kwargs):
        if self.offload_backend is not None and any(layer.fused is not None for layer in self.layers()):
            self.fuse_lora()
        return super().denoise(*args, **kwargs)


@wrong("check_casts_within_calls")
class PutsBackWhatItKnew(HandWritten):
    """Binds weights to the host memory that they had when their component came, wherever they went meanwhile."""

    def enter(self, path):
        if not self.residencies[path].loaded:
            known = [(p, p.data) for p in self.originals[path].parameters()]
            self.__dict__.setdefault("known", {})[path] = known
        super().enter(path)

    def evict(self, but=None):
        super().evict(but)
        for path in [path for path in self.__dict__.get("known", {}) if path != but and path in self.rotating]:
            for parameter, data in self.known.pop(path):
                parameter.data = data

    def leave(self, path):
        if not self.calls:
            self.evict()

    def forget(self):
        super().forget()
        self.__dict__.pop("known", None)


@wrong("check_replaced_component")
class HoldsOnToComponents(HandWritten):
    """Does not see that a component was replaced."""

    def require_originals(self):
        """Trust."""


@wrong("check_shared_component")
class DisablesOthers(Tiny):
    """Disabling one pipeline disables all that share a component with it."""

    known = []

    def enable_omni_offload(self, *args, **kwargs):
        self.known.append(self)
        return super().enable_omni_offload(*args, **kwargs)

    def disable_omni_offload(self):
        mine = {id(part) for part in self.parts().values()}
        for other in [pipeline for pipeline in self.known if mine & {id(part) for part in pipeline.parts().values()}]:
            self.known.remove(other)
            OmniOffloadMixin.disable_omni_offload(other)
        super().disable_omni_offload()


@wrong("check_user_hooks")
class RemovesOthersWrappers(Switched):
    """Disable takes every wrapper of forward away, whoever put it there."""

    def disable_omni_offload(self):
        super().disable_omni_offload()
        for part in self.parts().values():
            vars(part).pop("forward", None)


# ---- failures ----------------------------------------------------------------------------------------------------------------


@wrong("check_rollback")
class LeavesWeightsOnTheHost(HandWritten):
    """Where enabling fails, weights that were found on the device end on the host."""

    def give_up(self, *, undo):
        super().give_up(undo=False)


@wrong(
    "check_failing_uses",
    **of("it lets a call fail too", "failing_callback", "failing_activations", "stray_use"),
    check_interrupted_call="an interrupt skips the last line too",
)
class CleansUpAtTheEnd(HandWritten):
    """What ends a call is its last line, which an error skips."""

    @contextlib.contextmanager
    def call(self):
        self.require_originals()
        before = self.calls
        self.calls = before + 1
        yield
        self.end_call(before)


@wrong("check_failing_callback")
class HidesErrorsOfCallbacks(Tiny):
    """Raises its own error where a callback fails."""

    def denoise(self, latents, text, callback=None, steps=3):
        def guarded(*args):
            try:
                callback(*args)
            except Exception as error:
                raise RuntimeError("the callback failed") from error

        return super().denoise(latents, text, callback and guarded, steps)


@wrong("check_failing_loads", check_failing_activations="loads are among its allocations")
class HidesMemoryErrorsOfLoads(HandWritten):
    """Raises its own error where a component finds no room."""

    def enter(self, path):
        try:
            super().enter(path)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"no room for {path}") from error


class HidesMemoryErrors(Denoiser):
    """Raises its own error where there is no room for an activation."""

    def forward(self, x, text):
        try:
            return super().forward(x, text)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the picture is too large") from error


@wrong("check_failing_activations")
class HidesMemoryErrorsOfActivations(Tiny):
    """Its DiT raises an error of its own where memory runs out."""

    def __init__(self):
        super().__init__()
        self.transformer = HidesMemoryErrors().eval()


@wrong("check_interrupted_enable")
class CleansUpAfterExceptions(HandWritten):
    """An interrupt of enable is no Exception to it: it forgets what it had begun."""

    def take_over(self):
        for path, part in self.originals.items():
            HookRegistry.get_or_create(part).register_hook("early", Hook(self, path), ("forward",))
        super().take_over()

    def unhook(self, path):
        HookRegistry.get_or_create(self.originals[path]).remove_hook("early")
        super().unhook(path)

    def give_up(self, *, undo):
        if isinstance(sys.exception(), KeyboardInterrupt):
            self.forget()
        else:
            super().give_up(undo=undo)


@wrong("check_interrupted_disable")
class ForgetsFirst(HandWritten):
    """Disable forgets what it manages before it has given it up."""

    def give_up(self, *, undo):
        residencies, originals, rotating = self.residencies or {}, self.originals, self.rotating
        self.forget()
        for path, residency in residencies.items():
            HookRegistry.get_or_create(originals[path]).remove_hook("hand")
            residency.restore(to_origin=undo, copy_back=not undo and path not in rotating)


@wrong("check_interrupted_call")
class CountsWithoutRepair(HandWritten):
    """An interrupt leaves it believing that a call goes on."""

    @contextlib.contextmanager
    def call(self):
        self.require_originals()
        self.calls += 1
        try:
            yield
        except Exception:
            self.end_call(self.calls - 1)
            raise
        self.end_call(self.calls - 1)


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@wrong("check_autograd")
class RecordsAutograd(HandWritten):
    """Runs in grad mode."""

    def refuse_autograd(self, module):
        """Accept."""


@wrong("check_autograd")
class RunsAPartWithoutGrad(Switched):
    """An entry point within a component turns grad mode off, so that what asks for gradients silently gets none."""

    _offload_entry_points = {"vae.decoder": ("forward",), "": ("encode_prompt",)}

    def __init__(self):
        super().__init__()
        self.vae.decoder = nn.Sequential(self.vae.decoder)

    def __call__(self, ids, latents, callback_on_step_end=None):
        text = self.encode_prompt(ids)
        latents = self.denoise(latents.to(self._execution_device, text.dtype), text, callback_on_step_end)
        return self.vae.decoder(latents)

    def switched_on(self, backend):
        if "inner" not in vars(self):
            self.inner = self.vae.decoder.forward
            vars(self.vae.decoder)["forward"] = torch.no_grad()(self.inner)

    def switched_off(self):
        if "inner" in vars(self):
            vars(self.vae.decoder)["forward"] = vars(self).pop("inner")


@wrong("check_foreign_offload")
class StealsComponents(Tiny):
    """Takes other libraries' hooks away."""

    def enable_omni_offload(self, *args, **kwargs):
        for part in self.parts().values():
            vars(part).pop("_hf_hook", None)
        return super().enable_omni_offload(*args, **kwargs)


@wrong("check_to_device")
class MovesWhileEnabled(Tiny):
    """Its to() takes no notice of offload."""


MovesWhileEnabled.to = Base.to


@wrong("check_stray_use")
class HidesStrayUses(Tiny):
    """Turns the error that names a weight into one that does not."""


_call = HidesStrayUses.__call__


def _hiding(self, *args, **kwargs):
    try:
        return _call(self, *args, **kwargs)
    except OffloadStateError:
        raise RuntimeError("something went wrong") from None


_hiding.__signature__ = inspect.signature(_call)
HidesStrayUses.__call__ = _hiding


@wrong("check_threads")
class KnowsOneThread(Tiny):
    """Runs in the thread that made it only."""

    def __init__(self):
        super().__init__()
        self.thread = threading.get_ident()

    def denoise(self, *args, **kwargs):
        if threading.get_ident() != self.thread:
            raise RuntimeError("called from another thread")
        return super().denoise(*args, **kwargs)


# ---- what streams --------------------------------------------------------------------------------------------------------------


class Hoarded(nn.Linear):
    """Keeps a copy of its weight when it has run, while what it belongs to is hooked."""

    def __init__(self, kept):
        super().__init__(WIDTH, WIDTH)
        self.kept = kept

    def forward(self, x):
        if HookRegistry.find(self) is not None:
            self.kept.append(self.weight.clone())
        return super().forward(x)


class Hoards(Denoiser):
    """Has copies of its blocks' weights until it is done."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.blocks = nn.ModuleList(Hoarded(self.kept) for _ in range(3))

    def forward(self, x, text):
        try:
            return super().forward(x, text)
        finally:
            self.kept.clear()


@wrong("check_slots", mode="layer", **of("what it keeps is more than the slots", "peak", "budget", "residents"))
class KeepsCopiesOfBlocks(Tiny):
    """Has device copies of all its blocks' weights at once."""

    def __init__(self):
        super().__init__()
        self.transformer = Hoards().eval()


@wrong("check_residents", mode="layer")
class LetsEveryBlockStream(Tiny):
    """Takes no notice of how many blocks are to stay."""

    def enable_omni_offload(self, config, **kwargs):
        return super().enable_omni_offload(attrs.evolve(config, layer_options={}), **kwargs)


class Noted(nn.Linear):
    """Notes that it runs."""

    def __init__(self, number, ran):
        super().__init__(WIDTH, WIDTH)
        self.number, self.ran = number, ran

    def forward(self, x):
        self.ran.append(self.number)
        return super().forward(x)


class WantsOrder(Denoiser):
    """Gives something else where its blocks have not run one after another, while it is hooked."""

    def __init__(self):
        super().__init__()
        self.ran = []
        self.blocks = nn.ModuleList(Noted(number, self.ran) for number in range(3))

    def forward(self, x, text):
        self.ran.clear()
        x = super().forward(x, text)
        return x + 1e-3 if self.ran != [0, 1, 2] and HookRegistry.find(self) is not None else x


@wrong("check_block_order", mode="layer")
class BelievesInTheOrder(Tiny):
    """Is right only as long as its blocks run in their order."""

    def __init__(self):
        super().__init__()
        self.transformer = WantsOrder().eval()


@wrong("check_block_report", mode="layer")
class ReportsNoHits(Switched):
    """Its report tells of no block that was fetched in time."""

    def switched_on(self, backend):
        def report():
            whole = type(backend).report(backend)
            return attrs.evolve(whole, components=tuple(attrs.evolve(c, prefetch_hits=0) for c in whole.components))

        backend.report = report


@wrong("check_traffic", mode="layer", **of("what is there is fetched again", "block_report", "residents", "keep_between_calls"))
class ReadsEverythingAgain(Tiny):
    """Counts all device copies as stale in each step."""

    def denoise(self, latents, text, callback=None, steps=3):
        for _ in range(steps):
            if self.offload_backend is not None:
                self.offload_backend.refresh()
            latents = super().denoise(latents, text, callback, 1)
        return latents


@wrong("check_on_device", mode="layer")
class HasNoRestOnDevice(HasNothingOnDevice):
    """on_device() does nothing where blocks stream, either."""


@wrong("check_stray_use", mode="layer")
class HidesStrayUsesOfBlocks(HidesStrayUses):
    """Turns the error that names a weight into one that does not where blocks stream, too."""


class Hides(Denoiser):
    """Raises its own error where a block fails."""

    def forward(self, x, text):
        for block in self.blocks:
            x = x + text
            try:
                y = block(x)
            except Exception as error:
                raise RuntimeError("a block failed") from error
            x = x + torch.tanh(y)
        return x


@wrong("check_failing_uses", mode="layer", check_failing_activations="a block fails where there is no room for what it makes")
class HidesErrorsOfBlocks(Tiny):
    """Its DiT raises an error of its own where a block fails."""

    def __init__(self):
        super().__init__()
        self.transformer = Hides().eval()


def case_for(cls):
    """Return the case of a wrong pipeline."""
    return case_of(cls, **getattr(cls, "fields", {}))
