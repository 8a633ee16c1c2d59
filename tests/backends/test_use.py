import gc
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

from omni_offload import ComponentPathError, OffloadStateError
from omni_offload.testing import sim


class Named(NamedTuple):
    a: torch.Tensor
    b: list


MODES = [{}, {"pin_memory": False}, {"device_memory": "1MiB"}, {"device_memory": "1MiB", "pin_memory": False}, {"keep_between_calls": True}]


@pytest.mark.parametrize("keys", MODES, ids=str)
@pytest.mark.parametrize("mode", ["threads", "virtual"])
def test_equals_a_resident_run(pipe, x, expected, kit, keys, mode):
    """The output is bit-identical, is on the device, and only what may stay stays."""
    sim.configure(mode=mode, races="raise")
    with pipe.enable_omni_offload(device="sim", **keys) as backend:
        for _ in range(3):
            y = pipe(x)
            assert torch.equal(y.cpu(), expected)
            assert y.device == backend.device
            assert kit.where(pipe) == set()
            del y
            assert bool(sim.allocated()) == bool(keys.get("keep_between_calls"))
    assert sim.allocated() == 0


@pytest.mark.parametrize("device_memory", [None, "exact"])
def test_evicts_before_it_loads(pipe, x, kit, device_memory):
    """The peak is the largest component, not the sum of two."""
    largest = max(kit.padded(c) for c in (pipe.text_encoder, pipe.transformer, pipe.vae))
    pipe.enable_omni_offload(device="sim", device_memory=device_memory and largest)
    sim.reset_peak()
    pipe(x)
    assert pipe.offload_report.peak_device_bytes == largest
    assert largest <= sim.peak() <= largest + 16 * x.nbytes
    pipe.disable_omni_offload()


def test_each_component_is_alone_while_it_runs(pipe, x, kit):
    """During a component's forward only that component is bound to the device."""
    pipe.enable_omni_offload(device="sim")
    seen = []
    for name, part in (("text_encoder", pipe.text_encoder.proj), ("transformer", pipe.transformer.blocks[0]), ("vae", pipe.vae.dec)):
        part.register_forward_pre_hook(lambda *_, name=name: seen.append((name, kit.where(pipe))))
    pipe(x)
    assert all(there == {name} for name, there in seen)
    assert [name for name, _ in seen] == ["text_encoder", *["transformer"] * 3, "vae", "vae"]
    pipe.disable_omni_offload()


def test_one_activation_for_a_tiled_decode(pipe, x):
    """Inner entries of a component count once: one load, one miss."""
    pipe.enable_omni_offload(device="sim")
    pipe(torch.cat([x] * 8))
    report = {c.name: (c.loads, c.misses, c.prefetch_hits) for c in pipe.offload_report.components}
    assert report == {"text_encoder": (1, 1, 0), "transformer": (1, 1, 0), "vae": (1, 1, 0)}
    pipe.disable_omni_offload()


def test_a_nested_use_leaves_the_outer_one_on_the_device(pipe, x, kit):
    """The weights stay bound until the outermost entry of a component ends."""

    class Again(kit.Vae):
        def decode(self, y):
            return self.dec(self.forward(y))

    pipe.vae = Again().requires_grad_(False)
    want = pipe.vae.decode(x)
    pipe.enable_omni_offload(device="sim")
    assert torch.equal(pipe.vae.decode(x).cpu(), want)
    pipe.disable_omni_offload()


def test_a_submodule_is_an_entry_point(pipe, x, kit):
    """A declared submodule that the pipeline calls brings its component to the device."""
    want = pipe.text_encoder.norm(x)
    pipe.enable_omni_offload(device="sim")
    for _ in range(2):
        assert torch.equal(pipe.text_encoder.norm(x).cpu(), want)
    assert kit.where(pipe) == set()
    pipe.disable_omni_offload()


def test_use_outside_a_call_stays_until_released(pipe, x):
    """A component used on its own keeps its copy until another needs the room, release() or disable."""
    backend = pipe.enable_omni_offload(device="sim")
    pipe.vae.encode(x)
    pipe.vae.encode(x)
    held = {c.name: c.resident_bytes for c in backend.report().components}
    assert held["vae"]
    assert not held["transformer"]
    assert {c.name: c.loads for c in backend.report().components}["vae"] == 1
    pipe.text_encoder(x)
    assert not {c.name: c.resident_bytes for c in backend.report().components}["vae"]
    backend.release()
    assert sim.allocated() == 0
    backend.disable()


def test_release_within_a_call_spares_what_runs(pipe, x, expected):
    """release() from a hook of a running component frees only the others."""
    backend = pipe.enable_omni_offload(device="sim", device_memory="1MiB")
    pipe.transformer.blocks[1].register_forward_pre_hook(lambda *_: backend.release())
    assert torch.equal(pipe(x).cpu(), expected)
    backend.disable()


def test_release_from_another_thread_waits_for_the_call(pipe, x, expected):
    """release() from another thread runs after the call."""
    backend = pipe.enable_omni_offload(device="sim", keep_between_calls=True)
    thread = threading.Thread(target=backend.release)
    pipe.on_step = lambda step, y: (thread.start() if step == 0 else None, y)[1]
    assert torch.equal(pipe(x).cpu(), expected)
    thread.join()
    assert {c.resident_bytes for c in backend.report().components} == {0}
    backend.disable()


def test_nested_components(pipe, x, kit):
    """A component that calls another keeps its own weights; both leave at the end."""
    inner = pipe.vae

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(64, 64).requires_grad_(False)
            self.call = [inner]

        def forward(self, y, cond=None):
            y = self.w(y)
            y = self.call[0].encode(y)
            return self.w(y)

    pipe.transformer = Outer()
    want = pipe(x)
    seen = []
    inner.enc.register_forward_pre_hook(lambda *_: seen.append(kit.where(pipe)))
    pipe.enable_omni_offload(device="sim")
    assert torch.equal(pipe(x).cpu(), want)
    assert seen[-1] == {"transformer", "vae"}
    pipe.disable_omni_offload()
    pipe.enable_omni_offload(device="sim", device_memory=kit.padded(pipe.vae))
    with pytest.raises(OffloadStateError, match=f"vae needs {kit.padded(inner)} bytes beside transformer.*device_memory"):
        pipe(x)
    assert kit.where(pipe) == set()
    pipe.disable_omni_offload()


def test_co_residents_move_together(kit, x):
    """Declared co-residents are both on the device while one of them runs, and are loaded once a call."""

    class Together(kit.Pair):
        _co_resident_modules = [("transformer", "transformer_2")]

    pipe = Together()
    want = pipe(x)
    backend = pipe.enable_omni_offload(device="sim")
    assert torch.equal(pipe(x).cpu(), want)
    loads = {c.name: (c.loads, c.misses, c.wasted_copies) for c in backend.report().components}
    assert loads["transformer"] == (1, 1, 0)
    assert loads["transformer_2"] == (1, 0, 0)
    assert backend.report().peak_device_bytes == kit.padded(pipe.transformer) + kit.padded(pipe.transformer_2)
    backend.disable()


def test_alternating_without_co_residence(kit, x):
    """Undeclared alternation is right, and costs a load each time."""
    pipe = kit.Pair()
    want = pipe(x)
    backend = pipe.enable_omni_offload(device="sim")
    assert torch.equal(pipe(x).cpu(), want)
    assert {c.name: c.loads for c in backend.report().components}["transformer_2"] == 3
    backend.disable()


def test_inputs_are_aligned_every_time(pipe, x, kit):
    """Host inputs reach the device on the first use and on the second; the caller's containers stay its own."""
    got = []

    class Taker(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(64), requires_grad=False)

        def forward(self, y, cond=None, extra=None):
            got.append((y.device.type, extra))
            return y * self.w

    pipe.transformer = Taker()
    backend = pipe.enable_omni_offload(device="sim")
    cache = {}
    for _ in range(2):
        pipe.transformer(x, extra=Named(x, [x, 1]))
        pipe.transformer(x, extra=cache)
    assert [kind for kind, _ in got] == ["sim"] * 4
    assert got[0][1].a.device.type == got[2][1].b[0].device.type == "sim"
    assert got[1][1] is cache
    got.clear()
    backend.disable()


def test_autograd_is_refused(pipe, x):
    """Where autograd would record, the call is refused, with the reason; nothing is moved."""
    pipe.enable_omni_offload(device="sim")
    with pytest.raises(OffloadStateError, match="an input requires grad"):
        pipe.transformer(x.clone().requires_grad_())
    with pytest.raises(OffloadStateError, match="an input requires grad"):
        pipe.transformer(x, cond={"a": [x.clone().requires_grad_()]})
    pipe.vae.dec.weight.requires_grad_(True)
    with pytest.raises(OffloadStateError, match=r"its weight vae\.dec\.weight requires grad"):
        pipe.vae.decode(x)
    assert sim.h2d_bytes() == 0
    with torch.no_grad():
        pipe.vae.decode(x)
    pipe.vae.requires_grad_(False)
    pipe.disable_omni_offload()


@pytest.mark.parametrize("enable", [False, True])
@pytest.mark.parametrize("call", [False, True])
@pytest.mark.parametrize("make", [False, True])
@pytest.mark.parametrize("disable", [False, True])
def test_inference_mode(device, kit, x, expected, make, enable, call, disable):
    """Inference mode may be on or off wherever weights are made, managed, used and given back."""
    with torch.inference_mode(make):
        pipe = kit.Pipe()
    with torch.inference_mode(enable):
        pipe.enable_omni_offload(device="sim")
    for _ in range(2):
        with torch.inference_mode(call):
            assert torch.equal(pipe(x).cpu(), expected)
    with torch.inference_mode(disable):
        pipe.disable_omni_offload()
    assert torch.equal(pipe(x), expected)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_keeps_no_weights_on_the_device(device, kit, x, cache):
    """What autocast makes of weights that it takes for trained ones, it would keep there until its context ends; it caches again after a use."""

    def play(pipe, at_end):
        with torch.no_grad(), torch.autocast("sim", torch.bfloat16, cache_enabled=cache):
            outputs = [pipe(x.to("sim")).cpu() for _ in range(2)]
            at_end()
            pipe.on_step = lambda *_: 1 / 0
            with pytest.raises(ZeroDivisionError):
                pipe(x.to("sim"))
            assert torch.is_autocast_cache_enabled() is cache
        return outputs

    def nothing_left():
        torch.accelerator.synchronize(device)
        assert sim.allocated() == 0

    resident, pipe = kit.Pipe(), kit.Pipe()
    for one in (resident, pipe):
        for part in (one.text_encoder, one.transformer, one.vae):
            part.requires_grad_(True)
    for part in (resident.text_encoder, resident.transformer, resident.vae):
        part.to("sim")
    wanted = play(resident, lambda: None)
    del resident, one, part
    gc.collect()
    with pipe.enable_omni_offload(device="sim"):
        assert all(map(torch.equal, play(pipe, nothing_left), wanted))


def test_a_use_that_ends_in_another_thread(device, kit):
    """The switch of autocast is each thread's own: that of the other one is left alone."""
    pipe, seen = kit.Pipe(), []

    def hold():
        with pipe.on_device("vae"):
            yield

    def close():
        torch.set_autocast_cache_enabled(False)
        holder.close()
        seen.append(torch.is_autocast_cache_enabled())

    with pipe.enable_omni_offload(device="sim"), torch.autocast("sim", torch.bfloat16):
        holder = hold()
        next(holder)
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    assert seen == [False]
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("method", ["lazily", "steps"])
def test_generators_are_refused(device, kit, x, method):
    """A generator function is refused when offload is enabled, a method that returns one where it does."""

    class Vae(kit.Vae):
        def steps(self, y):
            yield self.dec(y)

    class Lazy(kit.Pipe):
        _offload_entry_points = {"vae": (method,)}

    pipe = Lazy()
    pipe.vae = Vae().requires_grad_(False)
    if method == "steps":
        with pytest.raises(ComponentPathError, match="generator"):
            pipe.enable_omni_offload(device="sim")
        return
    pipe.enable_omni_offload(device="sim")
    with pytest.raises(OffloadStateError, match="returned a generator, which has not done its work"):
        pipe.vae.lazily(x)
    pipe.disable_omni_offload()


def test_on_device(pipe, x, kit, expected):
    """Weights used outside entry points are on the device within on_device, also around a whole call that fails."""
    want = torch.nn.functional.linear(x, pipe.vae.enc.weight)
    with pipe.on_device("vae"):
        assert kit.where(pipe) == set()
    backend = pipe.enable_omni_offload(device="sim")
    with pipe.on_device("vae", "text_encoder"):
        assert kit.where(pipe) == {"vae", "text_encoder"}
        assert torch.equal(torch.nn.functional.linear(x.to("sim"), pipe.vae.enc.weight).cpu(), want)
        assert torch.equal(pipe(x).cpu(), expected)
        pipe.on_step = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            pipe(x)
        assert kit.where(pipe) == {"vae", "text_encoder"}
    assert kit.where(pipe) == set()
    with pytest.raises(ComponentPathError, match="names component 'unet', which is not managed; managed are: text_encoder"):
        pipe.on_device("unet")
    with pytest.raises(ValueError, match="boom"), pipe.on_device("vae"):
        raise ValueError("boom")
    assert kit.where(pipe) == set()
    backend.disable()


def test_on_device_of_a_component_without_bytes(device, kit):
    """A component that is None takes part without effect."""

    class Optional(kit.Pipe):
        _encoder_modules = ["text_encoder", "image_encoder"]
        image_encoder = None

    pipe = Optional()
    with pipe.enable_omni_offload(device="sim"), pipe.on_device("image_encoder", "vae"):
        assert kit.where(pipe) == {"vae"}


def test_the_device_index_is_kept(device, kit, x, expected):
    """Enabled on another than the current device, weights, inputs and outputs are there."""
    pipe = kit.Pipe()
    backend = pipe.enable_omni_offload(device="sim:1")
    assert backend.device == pipe._execution_device == torch.device("sim:1")
    y = pipe(x)
    assert y.device == torch.device("sim:1")
    assert torch.equal(y.cpu(), expected)
    assert torch.accelerator.current_device_index() == 0
    backend.disable()


def test_nested_use_on_another_stream(pipe, x, expected):
    """A nested use on another stream waits for the copy, and the memory is not freed before that stream is done."""
    sim.configure(races="raise", mode="virtual")
    side = torch.Stream("sim")
    inner = pipe.vae.forward

    pipe.enable_omni_offload(device="sim")

    def tile(y):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            out = pipe.vae(y)
        torch.accelerator.current_stream().wait_stream(side)
        return out

    assert inner
    pipe.vae.tile = tile
    pipe.vae.__dict__["tile"] = tile
    for _ in range(2):
        assert torch.equal(pipe(x).cpu(), expected)
    del pipe.vae.__dict__["tile"]
    pipe.disable_omni_offload()


def test_no_host_synchronisation_in_a_steady_call(pipe, x):
    """With pinned masters a call whose weights are there returns long before the device has done its work."""
    sim.configure(mode="virtual", flops=1e6)
    pipe.text_encoder.eval()  # else its buffer counts as written
    pipe.enable_omni_offload(device="sim", keep_between_calls=True, device_memory="1MiB")
    y = x.to("sim")
    pipe(y)
    torch.accelerator.synchronize(y.device)
    start, before = sim.clock(), sim.d2h_bytes()
    pipe(y)
    sim.host_work(0.1)  # at the same time as the device's work, unless the call waited for it
    torch.accelerator.synchronize(y.device)
    assert 0.2 < sim.clock() - start < 0.25
    assert sim.d2h_bytes() == before
    sim.configure(flops=1e14)
    pipe.disable_omni_offload()
