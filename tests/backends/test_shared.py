"""Pipelines that share a component, components that are replaced, pipelines that are dropped."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from omni_offload import OffloadConfigError, OffloadStateError
from omni_offload.testing import sim


def make_two(kit):
    a, b = kit.Pipe(), kit.Pipe(seed=1)
    b.text_encoder = a.text_encoder
    return a, b


@pytest.fixture
def two(kit, device):
    """Two pipelines that share a text encoder."""
    return make_two(kit)


def test_calls_in_any_order(two, x):
    """Both pipelines are right, alone and in turn; the shared weights are pinned once."""
    a, b = two
    want = a(x), b(x)
    a.enable_omni_offload(device="sim")
    one = sim.pinned_bytes()
    b.enable_omni_offload(device="sim")
    assert sim.pinned_bytes() < 2 * one
    for pipe, out in ((a, 0), (b, 1), (b, 1), (a, 0)):
        assert torch.equal(pipe(x).cpu(), want[out])
    assert torch.equal(a.text_encoder(x).cpu(), b.text_encoder(x).cpu())
    a.disable_omni_offload()
    b.disable_omni_offload()


@pytest.mark.parametrize("first", [0, 1])
def test_disable_in_any_order(two, x, kit, first):
    """The shared component is managed until the last pipeline gives it up; what is not shared is free at once."""
    pipes = list(two)
    want = [pipe(x) for pipe in pipes]
    for pipe in pipes:
        pipe.enable_omni_offload(device="sim")
        pipe(x)
    pipes[first].disable_omni_offload()
    left = pipes[1 - first]
    assert all(component.pinned_bytes for component in left.offload_report.components)
    assert sim.pinned_bytes() <= sum(kit.padded(c) for c in (left.text_encoder, left.transformer, left.vae))
    assert torch.equal(left(x).cpu(), want[1 - first])
    assert kit.hooks(pipes[first]) == kit.hooks(left)[:2]
    left.disable_omni_offload()
    assert sim.pinned_bytes() == 0
    assert torch.equal(pipes[first](x), want[first])


@pytest.mark.parametrize(
    ("keys", "device_name"),
    [({"pin_memory": False}, "sim"), ({}, "sim:1"), ({"components": ["dit"]}, "sim")],
    ids=["pinning", "device", "treatment"],
)
def test_conflicting_owners_are_refused(two, x, kit, keys, device_name):
    """Another device, pinning or treatment is refused, and the second pipeline is as it was."""
    a, b = two
    a.enable_omni_offload(device="sim")
    with pytest.raises(OffloadStateError, match=r"'text_encoder'.*managed for another pipeline as 'text_encoder'.*was asked for"):
        b.enable_omni_offload(device=device_name, **keys)
    assert b.offload_backend is None
    assert kit.hooks(b) == kit.hooks(a)[: len(kit.hooks(b))]
    a.disable_omni_offload()
    assert kit.hooks(b) == []


def test_partial_sharing_is_refused(kit, device, x, expected):
    """A component that holds a part of another pipeline's component is refused, and named."""
    a, b = kit.Pipe(), kit.Pipe()
    b.transformer.blocks[0] = a.transformer.blocks[0]
    a.enable_omni_offload(device="sim")
    with pytest.raises(OffloadStateError, match=r"transformer.*blocks\.0.*managed by another offload owner"):
        b.enable_omni_offload(device="sim")
    assert kit.hooks(b) == []
    assert torch.equal(a(x).cpu(), expected)
    a.disable_omni_offload()


def test_two_threads_use_a_shared_component(two, x):
    """Two pipelines run at once in two threads, the shared component in both."""
    want = [pipe(x) for pipe in two]
    got = [[], []]
    for pipe in two:
        pipe.enable_omni_offload(device="sim")

    def work(index):
        for _ in range(10):
            got[index].append(two[index](x).cpu())

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert [len(out) for out in got] == [10, 10]
    for index in range(2):
        assert all(torch.equal(out, want[index]) for out in got[index])
    got.clear()
    for pipe in two:
        pipe.disable_omni_offload()


def test_two_threads_on_one_pipeline(pipe, x, expected):
    """Calls on one pipeline take turns."""
    pipe.enable_omni_offload(device="sim")
    running, most, got = [], [], []

    def step(_, y):
        running.append(1)
        most.append(len(running))
        running.pop()
        return y

    pipe.on_step = step
    threads = [threading.Thread(target=lambda: got.append(pipe(x).cpu()), daemon=True) for _ in range(4)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert len(got) == 4
    assert all(torch.equal(out, expected) for out in got)
    assert set(most) == {1}
    pipe.disable_omni_offload()


def test_disable_waits_for_another_threads_call(pipe, x, expected):
    """disable() in one thread lets another's call end first; a call that waited for it runs without offload."""
    pipe.enable_omni_offload(device="sim")
    inside, go, got = threading.Event(), threading.Event(), []

    def step(index, y):
        if index == 0:
            inside.set()
            assert go.wait(20)
        return y

    pipe.on_step = step
    caller = threading.Thread(target=lambda: got.append(pipe(x).cpu()), daemon=True)
    caller.start()
    assert inside.wait(20)
    ender = threading.Thread(target=pipe.disable_omni_offload, daemon=True)
    ender.start()
    go.set()
    caller.join(20)
    ender.join(20)
    assert torch.equal(got.pop(), expected)
    assert pipe.offload_backend is None
    assert sim.pinned_bytes() == 0


def test_uses_that_waited_for_disable_run_unmanaged(pipe, x, expected):
    """A call and a use that waited for the lock while the offload was disabled run on the host."""
    backend = pipe.enable_omni_offload(device="sim")
    rotation = backend._rotation
    want = pipe.vae.decode(x).cpu()
    token, got = object(), []
    rotation.lock.acquire(token)
    threads = [
        threading.Thread(target=lambda: got.append(("call", pipe(x))), daemon=True),
        threading.Thread(target=lambda: got.append(("use", pipe.vae.decode(x))), daemon=True),
    ]
    [t.start() for t in threads]
    from omni_offload.backends import lock

    while list(lock._WAITING.values()).count(rotation.lock) < 2:
        pass
    assert backend._uninstall(undo=False) is None
    backend._forget()
    rotation.lock.release(token)
    [t.join(20) for t in threads]
    got = dict(got)
    assert torch.equal(got["use"], want)
    assert torch.equal(got["call"], expected)


def test_a_use_outside_a_call_keeps_other_threads_out(pipe, x):
    """It holds the pipeline's lock from entry to exit, also where it fails."""
    backend = pipe.enable_omni_offload(device="sim")
    lock = backend._rotation.lock
    seen = []
    pipe.vae.dec.forward = lambda y: (seen.append(lock.in_call()), y)[1]
    pipe.vae.decode(x)
    seen.append(lock.in_call())
    pipe.vae.dec.forward = lambda _: seen.append(lock.in_call()) or 1 / 0
    with pytest.raises(ZeroDivisionError):
        pipe.vae.decode(x)
    seen.append(lock.in_call())
    assert seen == [True, True, False, True, False]
    backend.disable()


def test_a_deadlock_is_refused(kit, device, x):
    """Two threads whose calls wait for each other: one is refused, the other ends."""
    a, b = kit.Pipe(), kit.Pipe(seed=1)
    barrier = threading.Barrier(2, timeout=20)
    results = []

    def nest(outer, inner):
        def step(index, y):
            if index == 0:
                barrier.wait()
                inner(x)
            return y

        outer.on_step = step

    nest(a, b.encode_prompt)
    nest(b, a.encode_prompt)
    for pipe in (a, b):
        pipe.enable_omni_offload(device="sim")

    def work(pipe):
        try:
            pipe(x)
            results.append("done")
        except OffloadStateError as error:
            results.append(str(error)[:14])

    threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in (a, b)]
    [t.start() for t in threads]
    [t.join(30) for t in threads]
    assert sorted(results) == ["a call on Pipe", "done"]
    for pipe in (a, b):
        pipe.disable_omni_offload()


def test_a_component_is_used_within_another_pipelines_call(two, x):
    """Within a's call the shared component counts as a's, and b's own component as b's."""
    a, b = two
    want = b.vae.encode(x)
    got = []
    a.on_step = lambda _, y: (got.append(b.vae.encode(x).cpu()), a.text_encoder(y), y)[2]
    a.enable_omni_offload(device="sim")
    b.enable_omni_offload(device="sim")
    a(x)
    assert torch.equal(got[-1], want)
    assert {c.name: c.resident_bytes for c in b.offload_report.components}["text_encoder"] == 0
    a.disable_omni_offload()
    b.disable_omni_offload()


def test_the_other_pipeline_of_a_shared_component_takes_no_part(two, x):
    """Within a's call its hooks do nothing for b: b's lock is free."""
    a, b = two
    for pipe in two:
        pipe.enable_omni_offload(device="sim")
    lock = b.offload_backend._rotation.lock
    seen = []
    part = a.text_encoder.proj.forward
    a.text_encoder.proj.forward = lambda y: (seen.append(lock.in_call()), part(y))[1]
    a(x)
    assert seen == [False]
    for pipe in two:
        pipe.disable_omni_offload()


def test_a_dropped_pipeline_frees_everything(kit, device, x):
    """A pipeline that is dropped without disable takes its memory with it."""
    pipe = kit.Pipe()
    pipe.enable_omni_offload(device="sim", keep_between_calls=True)
    pipe(x)
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


def test_a_component_of_a_dropped_pipeline_can_be_managed_again(device, x, kit):
    """A shared component does not stay managed for a pipeline that is gone."""
    a, b = make_two(kit)
    want = b(x)
    a.enable_omni_offload(device="sim", pin_memory=False)
    encoder = a.text_encoder
    del a
    gc.collect()
    b_backend = b.enable_omni_offload(device="sim:1")
    assert torch.equal(b(x).cpu(), want)
    b_backend.disable()
    assert "forward" not in encoder.__dict__
    assert kit.hooks(b) == []


def test_disable_gives_up_for_dropped_pipelines_too(device, x, kit):
    """The last pipeline's disable frees what a dropped one shared with it."""
    a, b = make_two(kit)
    a.enable_omni_offload(device="sim")
    b.enable_omni_offload(device="sim")
    encoder = a.text_encoder
    del a
    gc.collect()
    b.disable_omni_offload()
    assert (sim.pinned_bytes(), encoder.proj.weight.device.type) == (0, "cpu")
    assert kit.hooks(b) == []


def test_a_replaced_component_is_managed(pipe, x, kit):
    """A component put in another's place is hooked and moved from the next call on; the old one is free."""
    old, new = pipe.vae, kit.Vae().requires_grad_(False)
    pipe.enable_omni_offload(device="sim", keep_between_calls=True)
    pipe(x)
    pipe.vae = new
    y = pipe(x)
    assert y.device.type == "sim"
    assert [c.name for c in pipe.offload_report.components] == ["text_encoder", "transformer", "vae"]
    assert "decode" not in old.__dict__
    assert "decode" in new.__dict__
    pipe.disable_omni_offload()
    assert torch.equal(pipe(x), y.cpu())
    assert kit.hooks(pipe) == []


@pytest.mark.parametrize("keys", [{}, {"device_memory": "1MiB"}], ids=str)
def test_a_component_set_to_none_is_given_up(pipe, x, kit, keys):
    """A component that is None takes part without effect, and is managed again when it comes back."""
    vae = pipe.vae
    pipe.enable_omni_offload(device="sim", **keys)
    pipe(x)
    pipe.vae = None
    pipe.encode_prompt(x)
    assert [c.name for c in pipe.offload_report.components] == ["text_encoder", "transformer"]
    assert "decode" not in vae.__dict__
    pipe.transformer(x)
    pipe.encode_prompt(x)
    pipe.vae = vae
    assert pipe(x).device.type == "sim"
    pipe.disable_omni_offload()


@pytest.mark.parametrize("keys", [{}, {"components": ["dit"]}, {"device_memory": "1MiB"}], ids=str)
def test_a_component_that_was_none_is_managed(kit, device, x, keys):
    """A declared component that was None when offload was enabled is taken in, with its entry points and co-residents, once it is there."""

    class Late(kit.Pair):
        _co_resident_modules = [("transformer", "transformer_2")]
        _offload_entry_points = {"vae": ("decode",), "transformer_2": ("embed",)}

        def __call__(self, x):
            x = self.transformer(self.text_encoder(x))
            return self.vae.decode(x if self.transformer_2 is None else self.transformer_2.embed(x))

    pipe, late = Late(), kit.Transformer().requires_grad_(False)
    pipe.transformer_2 = None
    without = pipe(x)
    pipe.transformer_2 = late
    expected = pipe(x)
    pipe.transformer_2 = None
    backend = pipe.enable_omni_offload(device="sim", **keys)
    assert torch.equal(pipe(x).cpu(), without)
    pipe.transformer_2 = late
    for _ in range(2):
        assert torch.equal(pipe(x).cpu(), expected)
    assert backend.plan.component("transformer_2").treatment is backend.plan.component("transformer").treatment
    assert backend.plan.co_residents == (("transformer", "transformer_2"),)
    assert {c.name: c.loads for c in pipe.offload_report.components}["transformer_2"] == 2
    pipe.transformer_2 = None
    assert torch.equal(pipe(x).cpu(), without)
    assert kit.hooks(pipe) == [pipe.text_encoder, pipe.transformer, pipe.vae]
    pipe.transformer_2 = late
    assert torch.equal(pipe(x).cpu(), expected)
    pipe.disable_omni_offload()
    assert torch.equal(pipe(x), expected)
    assert kit.hooks(pipe) == []
    assert late.pos_embed.device.type == "cpu"


def test_a_component_that_stays_is_cast_in_a_call(pipe, x, kit):
    """Where a call casts what stays on the device, the copy from before is not held beyond the call."""
    pipe.enable_omni_offload(device="sim", mode="module", components=["dit"])
    held = sim.allocated()
    pipe.on_step = lambda step, x: (pipe.text_encoder.to(torch.float32 if step else torch.float64), x)[1]
    for _ in range(2):
        pipe(x)
        assert sim.allocated() == held
    pipe.disable_omni_offload()
    assert {p.dtype for p in pipe.text_encoder.parameters()} == {torch.float32}


def test_a_component_that_was_none_and_does_not_fit(pipe, x, kit, expected):
    """A component that is put where none was is refused, where the budget does not hold it, and free again when it is gone."""
    vae, pipe.vae = pipe.vae, None
    pipe.enable_omni_offload(device="sim", device_memory=kit.padded(pipe.transformer))
    pipe.encode_prompt(x)
    pipe.vae = nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)]).requires_grad_(False)
    pipe.vae.encode = pipe.vae.decode = pipe.vae.tile = pipe.vae.forward
    for _ in range(2):
        with pytest.raises(OffloadConfigError, match="device_memory="):
            pipe(x)
    pipe.vae = vae
    assert torch.equal(pipe(x).cpu(), expected)
    pipe.disable_omni_offload()


def test_a_replacement_that_cannot_be_managed(pipe, x, expected):
    """A replacement that fails is refused by name in each call, until it is put right; the rest stays managed."""
    good = pipe.vae
    backend = pipe.enable_omni_offload(device="sim")
    with torch.device("meta"):
        pipe.vae = type(good)()
    for _ in range(2):
        with pytest.raises(OffloadConfigError, match=r"vae.*meta"):
            pipe(x)
    pipe.vae = good
    assert torch.equal(pipe(x).cpu(), expected)
    backend.disable()


def test_a_replacement_larger_than_the_budget(pipe, x, kit, expected):
    """A replacement is checked against the budget, in each call until it is put right."""
    small = pipe.vae
    pipe.enable_omni_offload(device="sim", device_memory=kit.padded(pipe.transformer))
    pipe.vae = nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)]).requires_grad_(False)
    pipe.vae.encode = pipe.vae.decode = pipe.vae.tile = pipe.vae.forward
    for _ in range(2):
        with pytest.raises(OffloadConfigError, match="device_memory="):
            pipe(x)
    pipe.vae = small
    assert torch.equal(pipe(x).cpu(), expected)
    pipe.disable_omni_offload()


def test_one_module_under_two_names(kit, device, x):
    """A module with two names is one component; where the names part, the call is refused."""

    class Twice(kit.Pipe):
        _encoder_modules = ["text_encoder", "text_encoder_2"]
        _offload_entry_points = {"text_encoder.norm": ("forward",), "text_encoder_2.norm": ("forward",)}

        def __init__(self):
            super().__init__()
            self.text_encoder_2 = self.text_encoder

        def __call__(self, y):
            return self.text_encoder_2.norm(self.text_encoder(y))

    pipe = Twice()
    want = pipe(x)
    backend = pipe.enable_omni_offload(device="sim")
    assert torch.equal(pipe(x).cpu(), want)
    assert len(backend.report().components) == 3
    with pipe.on_device("text_encoder_2"):
        assert kit.where(pipe) == {"text_encoder", "text_encoder_2"}
    pipe.text_encoder_2 = kit.Encoder()
    with pytest.raises(OffloadStateError, match=r"'text_encoder' and 'text_encoder_2' were one module"):
        pipe(x)
    backend.disable()


def test_a_copy_of_an_enabled_pipeline_is_independent(pipe, x, expected, kit):
    """A deepcopied pipeline or component is whole, unmanaged, and runs its own weights."""
    pipe.enable_omni_offload(device="sim", keep_between_calls=True)
    pipe(x)
    twin, vae = copy.deepcopy(pipe), copy.deepcopy(pipe.vae)
    assert twin.offload_backend is None
    assert torch.equal(twin(x), expected)
    twin.vae.dec.weight.data.zero_()
    vae.dec.weight.data.zero_()
    assert torch.equal(vae.decode(x), twin.vae.decode(x))
    assert torch.equal(pipe(x).cpu(), expected)
    with twin.enable_omni_offload(device="sim"):
        assert twin(x).device.type == "sim"
    pipe.disable_omni_offload()
