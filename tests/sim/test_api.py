"""Ordinary torch calls work on the device and give the CPU's bits."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch gives it)

from omni_offload.testing import sim


def same(made, expected):
    assert made.device.type == "sim"
    assert made.dtype == expected.dtype
    assert torch.equal(made.cpu(), expected)


# ---- operators: run on the CPU and on the device, and compare --------------------------------------------------------

OPERATORS = {
    "arithmetic": lambda x: x * 2 + x / 3 - x.sqrt(),
    "matmul": lambda x: x @ x.mT,
    "python scalar": lambda x: 2 * x + 1,
    "cpu 0-dim": lambda x: x + torch.tensor(2.0),
    "transpose view": lambda x: x.t().reshape(-1)[3:17:2],
    "narrow and flip": lambda x: x.narrow(0, 1, 3).flip(1),
    "unfold": lambda x: x.unfold(1, 2, 2).sum(-1),
    "chunk and cat": lambda x: torch.cat(x.chunk(2, 1)[::-1], 0),
    "in-place on view": lambda x: x.clone()[1].mul_(3),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x).conj() * 2),
    "conj clone": lambda x: torch.complex(x, -x).conj().clone(),
    "neg view": lambda x: torch.complex(x, -x).conj().imag.clone(),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "sort": lambda x: x.sort(dim=1, descending=True).values,
    "topk indices": lambda x: x.topk(3).indices,
    "boolean index": lambda x: x[x > 0.5],
    "cpu index": lambda x: x[torch.tensor([2, 0])],
    "index_put": lambda x: x.clone().index_put((torch.tensor([0], device=x.device),), torch.ones(1, device=x.device)),
    "nonzero": lambda x: (x > 0.5).nonzero(),
    "unique": lambda x: (x * 4).long().unique(),
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "layer norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "group norm": lambda x: F.group_norm(x[None], 2),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(8, device=x.device), torch.ones(8, device=x.device)),
    "conv2d": lambda x: F.conv2d(x[None, None], torch.ones(2, 1, 3, 3, device=x.device)),
    "conv transpose": lambda x: F.conv_transpose2d(x[None, None], torch.ones(1, 2, 3, 3, device=x.device)),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "embedding": lambda x: F.embedding(torch.tensor([1, 0], device=x.device), x),
    "silu gelu mish": lambda x: F.silu(x) + F.gelu(x) + F.mish(x),
    "softmax": lambda x: x.softmax(-1),
    "channel shuffle": lambda x: F.channel_shuffle(x[None, :, :, None], 2),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0)[1],
    "as_strided": lambda x: x.as_strided((3, 3), (8, 1), 2),
    "expand copy": lambda x: x[:1].expand(4, -1).contiguous(),
    "cumsum": lambda x: x.cumsum(0),
    "linalg": torch.linalg.norm,
    "to bfloat16": lambda x: x.to(torch.bfloat16) @ x.to(torch.bfloat16).mT,
    "to float8": lambda x: x.to(torch.float8_e4m3fn).to(torch.float32),
    "to int8": lambda x: (x * 100).to(torch.int8) + 1,
    "bool": lambda x: (x > 0.5) & (x < 0.9),
    "vmap": torch.vmap(lambda row: row.dot(row)),
    "item": lambda x: x + x.sum().item(),
    "ones and arange": lambda x: torch.ones_like(x) + torch.arange(8, device=x.device),
    "diagonal": lambda x: torch.diag(x).clone(),
    "repeat": lambda x: x.repeat(2, 1),
    "roll pad": lambda x: F.pad(x.roll(1, 0), (1, 1)),
    "linear": lambda x: F.linear(x, x, x[0]),
    "std var": lambda x: torch.var_mean(x, dim=1)[0],
    "clamp in place": lambda x: x.clone().clamp_(0.2, 0.8),
    "searchsorted": lambda x: torch.searchsorted(x.sort().values, x),
    "scatter": lambda x: torch.zeros_like(x).scatter_(1, torch.zeros(8, 8, dtype=torch.long, device=x.device), x),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.reshape(4, 4, 4), 2),
    "masked fill": lambda x: x.masked_fill(x > 0.5, float("-inf")),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_gives_the_bits_of_the_cpu(device, name):
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    same(OPERATORS[name](x.to(device)), OPERATORS[name](x))


MISMATCHES = {
    "add": lambda a, b: a + b,
    "in-place": lambda a, b: a.add_(b),
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "linear": F.linear,
    "conv": lambda a, b: F.conv2d(a[None, None], b[None, None]),
    "embedding": lambda a, b: F.embedding(torch.zeros(2, dtype=torch.long, device=a.device), b),
    "layer norm": lambda a, b: F.layer_norm(a, (4,), b[0]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None]),
    "out": lambda a, b: torch.add(a, a, out=b),
}


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_tensors_on_two_devices_are_refused(device, name, other):
    a, b = torch.rand(4, 4).to(device), torch.rand(4, 4).to(other)
    with pytest.raises(RuntimeError, match=r"all tensors to be on the same device.*sim:0"):
        MISMATCHES[name](a, b)


def test_numpy_is_refused(device):
    with pytest.raises(TypeError, match="sim"):
        torch.ones(2, device=device).numpy()


def test_cpu_generator_is_refused_on_the_device(device):
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        torch.rand(2, device=device, generator=torch.Generator("cpu"))


# ---- storage and tensors -----------------------------------------------------------------------------------------------


def test_out_argument_grows(device):
    out = torch.empty(0, device=device)
    torch.add(torch.ones(5, device=device), 1, out=out)
    same(out, torch.full((5,), 2.0))


def test_resize_grows_and_keeps_what_was_there(device):
    x = torch.arange(4.0, device=device)
    before = sim.allocated()
    x.resize_(1000)
    same(x[:4], torch.arange(4.0))
    assert sim.allocated() == before - 512 + 4096


def test_storage_is_freed_and_comes_back(device):
    x = torch.arange(400.0, device=device)
    view = x[10:]
    x.untyped_storage().resize_(0)
    assert sim.allocated() == 0
    x.untyped_storage().resize_(1600)
    x.copy_(torch.ones(400))
    same(view, torch.ones(390))


def test_set_shares_storage(device):
    x, y = torch.zeros(4, device=device), torch.empty(0, device=device)
    y.set_(x)
    y.add_(1)
    same(x, torch.ones(4))
    z = torch.empty(0, device=device).set_(x.untyped_storage(), 1, (2,), (1,))
    z.add_(1)
    same(x, torch.tensor([1.0, 2, 2, 1]))


def test_views_share_storage(device):
    x = torch.zeros(2, 3, device=device)
    for view in (x.view(6), x.t(), x[1], x.unfold(0, 2, 1), x.detach(), x.expand(1, 2, 3), x.split(1)[1]):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_deepcopy_keeps_ties(device):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(device)
    module[1].weight = module[0].weight
    made = copy.deepcopy(module)
    assert made[1].weight is made[0].weight
    same(made[0].weight.data, module[0].weight.data.cpu())


def test_repr_names_the_device(device):
    assert "device='sim:0'" in repr(torch.ones(2, device=device))


@pytest.mark.parametrize("where", ["cpu", "sim:1", None])
def test_save_and_load(device, where):
    file = io.BytesIO()
    torch.save({"w": torch.arange(3.0, device=device)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=where)["w"]
    assert loaded.device == torch.device(where or "sim:0")
    assert torch.equal(loaded.cpu(), torch.arange(3.0))


def test_copy_between_devices(device):
    x = torch.randn(3, 4)
    same(x.to(device).to("sim:1"), x)
    same(x.to("sim:1").t().to(device), x.t())


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.t(), lambda x: x[::2], lambda x: x[:, :1].expand(4, 4), lambda x: x[:0]])
def test_copies_of_any_layout_and_dtype(device, layout, direction):
    x = layout(torch.arange(16.0).view(4, 4))
    for dtype in (torch.float32, torch.bfloat16):
        if direction == "in":
            same(torch.empty(x.shape, dtype=dtype, device=device).copy_(x), x.to(dtype))
        else:
            made = torch.empty(x.shape, dtype=dtype).copy_(layout(torch.arange(16.0).view(4, 4).to(device)))
            assert torch.equal(made, x.to(dtype))


def test_to_empty_from_meta(device):
    with torch.device("meta"):
        module = torch.nn.Linear(3, 3)
    assert module.to_empty(device=device).weight.device == device


def test_device_context_and_default_index(device):
    with torch.device("sim"):
        assert torch.ones(2).device == device
    with torch.sim.device(1):
        assert torch.empty(2, device="sim").device == torch.device("sim", 1)
    assert torch.empty(2, device="sim").device == device


def test_invalid_device_is_refused(device):
    with pytest.raises(RuntimeError, match="invalid device index 7"):
        torch.empty(2, device="sim:7")


# ---- parameters ----------------------------------------------------------------------------------------------------------


def test_module_to_keeps_parameters(device):
    module = torch.nn.Linear(3, 3)
    before = [id(p) for p in module.parameters()]
    for where in (device, "cpu", "sim:1"):
        module.to(where)
        assert [id(p) for p in module.parameters()] == before
        assert module.weight.device == torch.device(where)


@pytest.mark.parametrize("inference", [False, True])
def test_parameter_data_crosses_devices(device, inference):
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with torch.inference_mode(inference):
        host = parameter.data
        parameter.data = torch.full((3,), 2.0, device=device)
        assert parameter.device == device
        assert torch.equal((parameter + 1).cpu(), torch.full((3,), 3.0))
        parameter.data = host
    assert parameter.device.type == "cpu"
    assert torch.equal(parameter, torch.ones(3))


def test_swap_tensors(device):
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2, device=device))
    torch.utils.swap_tensors(a, b)
    assert a.device == device
    assert b.device.type == "cpu"


# ---- random numbers --------------------------------------------------------------------------------------------------------


def test_generator_gives_the_numbers_of_the_cpu(device):
    made = torch.randn(5, device=device, generator=torch.Generator(device).manual_seed(3))
    same(made, torch.randn(5, generator=torch.Generator().manual_seed(3)))


def test_manual_seed_seeds_every_device(device):
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    same(torch.rand(4, device=device), expected)
    same(torch.rand(4, device="sim:1"), expected)


def test_random_state_is_kept_by_fork_rng(device):
    state = torch.sim.get_rng_state()
    with torch.random.fork_rng([0], device_type="sim"):
        torch.rand(9, device=device)
    assert torch.equal(torch.sim.get_rng_state(), state)


def test_device_has_a_default_generator_of_its_own(device):
    torch.manual_seed(1)
    expected = torch.randn_like(torch.ones(20))
    torch.manual_seed(1)
    torch.rand(7)
    same(torch.randn_like(torch.ones(20, device=device)), expected)


# ---- modes of torch ---------------------------------------------------------------------------------------------------------


def test_backward_equals_the_cpu(device):
    grads = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.GELU(), torch.nn.GroupNorm(2, 4)).to(where)
        module(torch.ones(1, 1, 6, 6, device=where)).square().sum().backward()
        grads.append([p.grad.cpu() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("mask", [None, "float", "bool"])
def test_attention_has_a_backward_pass(device, mask):
    made = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 6, 8).to(where).requires_grad_() for _ in range(3))
        bias = None if mask is None else (torch.rand(6, 6) + 0.5).to(where)
        out = F.scaled_dot_product_attention(q, k, v, bias > 0.7 if mask == "bool" else bias)
        out.square().sum().backward()
        made.append([t.cpu() for t in (out.detach(), q.grad, k.grad, v.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_recurrent_layers_run_and_refuse_to_be_recorded(device):
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        torch.manual_seed(0)
        layer, x = kind(4, 4), torch.randn(3, 2, 4)
        with torch.no_grad():
            expected = layer(x)[0]
            same(layer.to(device)(x.to(device))[0], expected)
        with pytest.raises(NotImplementedError, match=r"no backward pass on this device; call it under torch\.no_grad"):
            layer(x.to(device))


def test_optimizer_step_equals_the_cpu(device):
    weights = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 4).to(where)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
        module(torch.ones(2, 4, device=where)).sum().backward()
        optimizer.step()
        weights.append(module.weight.detach().cpu())
    assert torch.equal(*weights)


def test_loader_pins_its_batches(device):
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]


def test_autocast_lists(device):
    module, x = torch.nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    with torch.autocast("sim", torch.bfloat16):
        y = module(x)
        assert y.dtype == torch.bfloat16
        assert y.softmax(-1).dtype == torch.float32
        assert torch.add(x, 1).dtype == torch.float32
        assert y.sum().dtype == y.norm().dtype == torch.float32
        assert torch.cat([x, y]).dtype == torch.float32
        assert y.argmax().dtype == torch.long


def test_inference_mode(device):
    with torch.inference_mode():
        x = torch.ones(2, device=device) + 1
        x[0] = 5
    assert x.is_inference()
    same(x, torch.tensor([5.0, 2.0]))


def test_fake_tensors_need_no_memory(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(1 << 40, device=device)
        assert (x + 1).device == device
    assert sim.allocated() == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(device, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda x: (x @ x).relu().sum(-1), backend=backend)
        x = torch.randn(4, 4)
        same(compiled(x.to(device)), (x @ x).relu().sum(-1))
    torch._dynamo.reset()


def test_flop_counter(device):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        torch.ones(4, 8, device=device) @ torch.ones(8, 2, device=device)
    assert counter.get_total_flops() == 2 * 4 * 8 * 2


def test_complete_half_precision(device):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.rand(4, 4, dtype=dtype)
        same(F.gelu(x.to(device)) @ x.to(device), F.gelu(x) @ x)


# ---- torch.accelerator and torch.sim ------------------------------------------------------------------------------------------


def test_accelerator_is_the_device(device):
    acc = torch.accelerator
    assert acc.is_available()
    assert acc.current_accelerator() == torch.device("sim")
    assert acc.device_count() == 2
    acc.set_device_index(1)
    assert acc.current_device_index() == 1
    with acc.device_index(0):
        assert acc.current_device_index() == 0
    stream = torch.Stream("sim:1")
    acc.set_stream(stream)
    assert acc.current_stream() == stream
    acc.synchronize()
    assert torch.bfloat16 in acc.get_device_capability(device)["supported_dtypes"]
    acc.empty_host_cache()
    with pytest.raises(RuntimeError, match="Graph is not supported on device type: sim"):
        acc.Graph()


def test_accelerator_memory_functions(device):
    acc = torch.accelerator
    sim.configure(capacity=1 << 20)
    x = torch.ones(1024, device=device)
    assert acc.memory_allocated() == acc.memory_reserved() == 4096
    assert acc.get_memory_info() == ((1 << 20) - 4096, 1 << 20)
    del x
    assert (acc.memory_allocated(), acc.max_memory_allocated(), acc.max_memory_reserved()) == (0, 4096, 4096)
    acc.reset_peak_memory_stats()
    assert acc.max_memory_allocated() == 0
    acc.reset_accumulated_memory_stats()
    assert acc.memory_stats()["allocated_bytes.all.allocated"] == 0
    acc.empty_cache()


def test_device_module(device):
    assert torch.get_device_module("sim") is torch.sim
    assert torch.sim.current_device() == 0
    with torch.sim.stream(torch.sim.Stream(device)) as stream:
        assert torch.sim.current_stream() == stream
    assert torch.sim.current_stream() == torch.sim.default_stream()
    with torch.sim.stream(None):
        assert torch.sim.current_stream() == torch.sim.default_stream()
    torch.sim.synchronize()
    assert torch.sim.mem_get_info(device)[1] == torch.sim.get_device_properties(device).total_memory
    assert torch.sim.max_memory_allocated("sim:1") == 0


def test_stream_and_event_objects(device):
    stream, start, end = torch.Stream(device), torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    with stream:
        start.record()
        sim.spin(0.25)
        end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) == pytest.approx(250, rel=1e-3)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(torch.Event(device, enable_timing=True))


def test_tensor_methods_of_the_backend(device):
    x = torch.ones(2).sim()
    assert x.is_sim
    assert x.device == device
    assert torch.nn.Linear(1, 1).sim().weight.is_sim
