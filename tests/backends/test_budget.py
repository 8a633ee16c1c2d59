"""Budgets, fetching ahead, keeping between calls, edits between and within calls, components that stay."""

import logging

import pytest
import torch
from torch import nn

from omni_offload import OffloadConfigError, OffloadStateError
from omni_offload.testing import sim


def counts(pipe, *names):
    report = {c.name: c for c in pipe.offload_report.components}
    return {name: (report[name].loads, report[name].misses, report[name].prefetch_hits, report[name].wasted_copies) for name in names}


ALL = ("text_encoder", "transformer", "vae")


def test_the_budget_is_an_upper_bound(kit, device, x):
    """From the exact minimum on, every budget holds, in the report and on the device; one byte less is refused with the numbers."""
    pipe = kit.Pipe()
    want = pipe(x)
    sizes = [kit.padded(getattr(pipe, name)) for name in ALL]
    least = max(sizes)
    with pytest.raises(
        OffloadConfigError,
        match=f"device_memory={least - 1} bytes was asked for, and .*Pipe needs {least}: 0 for what stays .* and {least} for transformer",
    ):
        pipe.enable_omni_offload(device="sim", device_memory=least - 1)
    assert kit.hooks(pipe) == []
    for budget in (least, least + 64, sizes[0] + sizes[1], sum(sizes)):
        with pipe.enable_omni_offload(device="sim", device_memory=budget, keep_between_calls=True):
            sim.reset_peak()
            for _ in range(3):
                assert torch.equal(pipe(x).cpu(), want)
            assert pipe.offload_report.peak_device_bytes <= budget
            assert sim.peak() <= budget + 16 * x.nbytes + 4096


def test_a_budget_counts_what_stays(kit, device, x):
    """Components that stay are part of the minimum."""
    pipe = kit.Pipe()
    stay, need = kit.padded(pipe.text_encoder), kit.padded(pipe.transformer)
    with pytest.raises(OffloadConfigError, match=f"needs {stay + need}: {stay} for what stays on the device"):
        pipe.enable_omni_offload(device="sim", device_memory=stay + need - 1, components=["dit", "vae"])
    with pipe.enable_omni_offload(device="sim", device_memory=stay + need, components=["dit", "vae"]):
        pipe(x)
        assert pipe.offload_report.peak_device_bytes == stay + need


def test_the_next_component_is_fetched_ahead(pipe, x):
    """Under a budget that holds two, each use but the first finds its weights there."""
    pipe.enable_omni_offload(device="sim", device_memory="1MiB")
    pipe(x)
    assert counts(pipe, *ALL) == {"text_encoder": (1, 1, 0, 0), "transformer": (1, 0, 1, 0), "vae": (1, 0, 1, 0)}
    pipe(x)
    assert counts(pipe, *ALL) == {"text_encoder": (2, 2, 0, 0), "transformer": (2, 0, 2, 0), "vae": (2, 0, 2, 0)}
    pipe.disable_omni_offload()


def test_a_wrong_guess_is_counted(pipe, x):
    """A component that is fetched ahead and not used is a wasted copy; the next call has learned."""
    pipe.enable_omni_offload(device="sim", device_memory="1MiB")
    pipe.encode_prompt(x)
    assert counts(pipe, "transformer") == {"transformer": (1, 0, 0, 1)}
    pipe.encode_prompt(x)
    assert counts(pipe, "transformer") == {"transformer": (1, 0, 0, 1)}
    pipe(x)
    pipe(x)
    assert counts(pipe, "vae")["vae"][2] >= 1
    pipe.disable_omni_offload()


def test_what_is_fetched_ahead_survives_an_unforeseen_use(pipe, x, kit):
    """Room is made of what was used before, not of what comes next."""
    pipe.enable_omni_offload(device="sim", device_memory=kit.padded(pipe.transformer) + kit.padded(pipe.vae))
    encode = type(pipe).encode_prompt
    pipe.encode_prompt = lambda y: pipe.vae.encode(encode(pipe, y))
    pipe(x)
    assert counts(pipe, "text_encoder", "transformer") == {"text_encoder": (1, 1, 0, 0), "transformer": (1, 0, 1, 0)}
    del pipe.encode_prompt
    pipe.disable_omni_offload()


def test_keeping_between_calls(pipe, x, expected):
    """With room for all, the second call copies nothing; without a budget the last component is kept."""
    pipe.enable_omni_offload(device="sim", device_memory="1MiB", keep_between_calls=True)
    pipe(x)
    before = pipe.offload_report.totals["bytes_in"]
    assert torch.equal(pipe(x).cpu(), expected)
    assert pipe.offload_report.totals["bytes_in"] == before
    pipe.offload_backend.release()
    assert pipe.offload_report.totals["resident_bytes"] == 0
    pipe.disable_omni_offload()
    pipe.enable_omni_offload(device="sim", keep_between_calls=True)
    pipe(x)
    assert [bool(c.resident_bytes) for c in pipe.offload_report.components] == [False, False, True]
    pipe.disable_omni_offload()


def edit_in_place(pipe):
    with torch.no_grad():
        pipe.vae.dec.weight.mul_(2)


def edit_data(pipe):
    pipe.vae.dec.weight.data.mul_(2)


def replace_parameter(pipe):
    pipe.vae.dec.weight = nn.Parameter(pipe.vae.dec.weight.detach() * 2, requires_grad=False)


def assign_data(pipe):
    pipe.vae.dec.weight.data = pipe.vae.dec.weight.data * 2


def add_adapter(pipe):
    lora = nn.Linear(64, 64, bias=False).requires_grad_(False)
    torch.nn.init.ones_(lora.weight)
    pipe.vae.dec = nn.Sequential(pipe.vae.dec, lora)


EDITS = [edit_in_place, edit_data, replace_parameter, assign_data, add_adapter]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("when", ["between calls", "step callback"])
@pytest.mark.parametrize("keys", [{"device_memory": "1MiB", "keep_between_calls": True}, {}], ids=str)
def test_edits_are_in_force_at_the_next_use(kit, device, x, edit, when, keys):
    """An edit of a cached or prefetched component, between calls or from a callback, is used at its next use, and once."""
    pipe, plain = kit.Pipe(), kit.Pipe()
    pipe.enable_omni_offload(device="sim", **keys)
    pipe(x)
    if when == "between calls":
        edit(pipe)
    else:
        pipe.on_step = lambda step, y: (edit(pipe) if step == 1 else None, y)[1]
    edit(plain)
    want = plain(x)
    assert torch.equal(pipe(x).cpu(), want)
    pipe.on_step = lambda _, y: y
    assert torch.equal(pipe(x).cpu(), want)
    pipe.disable_omni_offload()
    assert torch.equal(pipe(x), want)


def test_refresh_reads_every_master_again(kit, device, x):
    """An edit that neither counter nor samples show is used after refresh()."""
    pipe, plain = kit.Pipe(), kit.Pipe()
    backend = pipe.enable_omni_offload(device="sim", device_memory="1MiB", keep_between_calls=True)
    pipe(x)
    for one in (pipe, plain):
        one.transformer.blocks[0].weight.data[1, 1] = 9.0
    backend.refresh()
    assert torch.equal(pipe(x).cpu(), plain(x))
    backend.disable()


def test_an_adapter_beyond_the_budget_is_refused(pipe, x, kit):
    """A component that has grown is measured again before it is fetched."""
    pipe.enable_omni_offload(device="sim", device_memory=kit.padded(pipe.transformer))
    pipe.transformer.more = nn.Linear(64, 64).requires_grad_(False)
    with pytest.raises(OffloadStateError, match=r"transformer needs .* beside what stays on the device"):
        pipe(x)
    del pipe.transformer.more
    pipe(x)
    pipe.disable_omni_offload()


def test_the_room_of_weights_that_are_gone_is_free_when_it_is(kit, device, x):
    """What was loaded together with an adapter is held with its room: the budget counts that, until the component is loaded anew."""
    pipe = kit.Pipe()
    pipe.vae.tall = nn.Linear(64, 600).requires_grad_(False)
    pipe.transformer.adapter = nn.Linear(64, 256).requires_grad_(False)
    before, vae = kit.padded(pipe.transformer), kit.padded(pipe.vae)
    del pipe.transformer.adapter
    after = kit.padded(pipe.transformer)
    assert vae > before
    pipe.transformer.adapter = nn.Linear(64, 256).requires_grad_(False)
    keys = {"device_memory": after + vae, "keep_between_calls": True}
    with pipe.enable_omni_offload(device=device, **keys) as backend, torch.no_grad():
        pipe.transformer(x)
        del pipe.transformer.adapter
        for _ in range(2):
            pipe.transformer(x)
            pipe.vae.decode(x)
            assert sim.allocated() <= after + vae + x.nbytes * 4
            assert sum(part.resident_bytes for part in backend.report().components) == after + vae
        assert backend.report().peak_device_bytes == after + vae
        assert {part.name: part.resident_bytes for part in backend.report().components} == {
            "text_encoder": 0,
            "transformer": after,
            "vae": vae,
        }


def test_running_out_of_memory_ahead_only_costs_time(pipe, x, expected, caplog):
    """A prefetch that finds no memory is given up, with a warning; the component is fetched at its use."""
    pipe.enable_omni_offload(device="sim", device_memory="1MiB")
    largest = max(c.weight_bytes for c in pipe.offload_report.components)
    sim.configure(capacity=largest + 8192)  # less than the budget: what is idle leaves before a use fails
    with caplog.at_level(logging.WARNING):
        assert torch.equal(pipe(x).cpu(), expected)
    assert "no device memory to fetch" in caplog.text
    sim.configure(capacity=0)
    pipe.disable_omni_offload()


@pytest.fixture
def staying(kit):
    """A pipeline with an image encoder that always stays, and its text encoder unselected."""

    class Staying(kit.Pipe):
        _resident_modules = ["image_encoder"]

        def __init__(self):
            super().__init__()
            self.image_encoder = kit.Encoder().requires_grad_(False).eval()
            self.text_encoder.eval()

        def __call__(self, y):
            return super().__call__(self.image_encoder(y))

    return Staying


def test_what_stays_is_on_the_device_while_enabled(staying, device, x, kit):
    """Unselected and resident components are loaded once, and copied back once, at disable."""
    pipe = staying()
    want = pipe(x)
    pipe.enable_omni_offload(device="sim", components=["dit", "vae"])
    for _ in range(2):
        assert kit.where(pipe) == {"image_encoder", "text_encoder"}
        assert torch.equal(pipe(x).cpu(), want)
    before, held = sim.d2h_bytes(), kit.padded(pipe.image_encoder) + kit.padded(pipe.text_encoder)
    pipe.offload_backend.release()
    assert kit.where(pipe) == {"image_encoder", "text_encoder"}
    pipe.disable_omni_offload()
    assert held - 4096 < sim.d2h_bytes() - before <= held
    assert torch.equal(pipe(x), want)


def test_edits_of_what_stays_survive(staying, device, x, kit):
    """Edits on the device, adapters and casts while enabled are in force, and are there after disable."""
    pipe, plain = staying(), staying()
    pipe.enable_omni_offload(device="sim", components=["dit", "vae"])
    pipe(x)
    for one in (pipe, plain):
        with torch.no_grad():
            one.image_encoder.proj.weight.mul_(0.5)
        one.text_encoder.proj.bias.data.add_(1)
    assert torch.equal(pipe(x).cpu(), plain(x))
    for one in (pipe, plain):
        one.image_encoder.to(torch.float64).to(torch.float32)
        torch.manual_seed(1)
        one.image_encoder.proj = nn.Sequential(one.image_encoder.proj, nn.Linear(64, 64).requires_grad_(False))
    assert torch.equal(pipe(x).cpu(), plain(x))
    assert kit.where(pipe) == {"image_encoder", "text_encoder"}
    pipe.disable_omni_offload()
    assert kit.where(pipe) == set()
    assert torch.equal(pipe(x), plain(x))


def test_what_stays_may_not_outgrow_the_budget(staying, device, x, kit):
    """An adapter on a component that stays is refused where the budget does not hold it; without it all is right again."""
    pipe = staying()
    want = pipe(x)
    stay = kit.padded(pipe.image_encoder) + kit.padded(pipe.text_encoder)
    pipe.enable_omni_offload(device="sim", components=["dit", "vae"], device_memory=stay + kit.padded(pipe.transformer))
    plain = pipe.image_encoder.proj
    pipe.image_encoder.proj = nn.Sequential(plain, *(nn.Linear(64, 64).requires_grad_(False) for _ in range(5)))
    with pytest.raises(OffloadStateError, match="image_encoder needs"):
        pipe(x)
    pipe.image_encoder.proj = plain
    assert torch.equal(pipe(x).cpu(), want)
    assert kit.where(pipe) == {"image_encoder", "text_encoder"}
    pipe.disable_omni_offload()


def test_a_replacement_of_what_stays(staying, device, x, kit):
    """A new component in a staying one's place goes to the device, the old one leaves it."""
    pipe = staying()
    pipe.enable_omni_offload(device="sim", components=["dit", "vae"])
    old, pipe.image_encoder = pipe.image_encoder, kit.Encoder().requires_grad_(False)
    y = pipe(x)
    assert kit.where(pipe) == {"image_encoder", "text_encoder"}
    assert old.proj.weight.device.type == "cpu"
    pipe.disable_omni_offload()
    assert torch.equal(pipe(x), y.cpu())


def test_what_stays_is_used_from_another_stream(staying, device, x):
    """A component that stays waits for its copy on any stream, and disable waits for its last use there."""
    sim.configure(races="raise", mode="virtual")
    pipe = staying()
    want = pipe.image_encoder(x)
    pipe.enable_omni_offload(device="sim", components=["dit", "vae"])
    side = torch.Stream("sim")
    y = x.to("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        out = pipe.image_encoder(y)
        assert torch.equal(out.cpu(), want)
    pipe.disable_omni_offload()
    side.synchronize()


@pytest.mark.parametrize("limit", [16384, 60000])
def test_a_host_limit_is_an_upper_bound(pipe, x, expected, limit):
    """Weights beyond host_memory stay pageable and go through the staging ring; what is pinned stays below the limit."""
    pipe.enable_omni_offload(device="sim", host_memory=limit)
    assert torch.equal(pipe(x).cpu(), expected)
    assert 0 < sim.pinned_bytes() <= limit
    assert pipe.offload_report.pinned_host_bytes == sim.pinned_bytes()
    pipe.disable_omni_offload()


@pytest.mark.parametrize(("keys", "transfer"), [({}, "overlapped"), ({"host_memory": "1MiB"}, "staged"), ({"pin_memory": False}, "serial")])
def test_the_report_says_how_weights_travel(pipe, x, keys, transfer):
    """Pinned masters overlap, pageable ones go through the ring or one after another."""
    pipe.transformer = nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 64)).requires_grad_(False)
    pipe.enable_omni_offload(device="sim", **keys)
    pipe.transformer(x)
    assert {c.name: c.transfer for c in pipe.offload_report.components}["transformer"] == transfer
    pipe.disable_omni_offload()


def test_disable_unpins_at_once(pipe):
    """The staging ring too, whoever still refers to what held it."""
    backend = pipe.enable_omni_offload(device="sim", host_memory="64KiB")
    context = backend._rotation.context
    assert context.host.pinned_bytes == sim.pinned_bytes() > 0
    backend.disable()
    assert context.host.pinned_bytes == sim.pinned_bytes() == 0
