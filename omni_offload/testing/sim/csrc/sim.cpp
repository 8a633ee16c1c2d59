// Registration of the software accelerator with torch's dispatcher, and its Python side.
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "kernel.h"

namespace sim {
namespace {

// ---- allocation and copies: the operators that the CPU's kernels cannot serve ---------------------------------------------------
Device device_or_current(std::optional<Device> d) { return d && d->has_index() ? *d : Device(kSim, tl_device); }

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> d,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(device_or_current(d));
  return Tensor(at::detail::empty_generic(size, &g_device_allocator, kSimKeys, c10::dtype_or_default(dtype), format));
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> d, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(device_or_current(d));
  return Tensor(at::detail::empty_strided_generic(size, stride, &g_device_allocator, kSimKeys, c10::dtype_or_default(dtype)));
}

// Moves dense memory of equal dtype and strides. The host waits where CUDA's would: for pageable memory, or if asked to.
void move(const Tensor& src, const Tensor& dst, bool non_blocking, Direction dir, Device dev) {
  static const char* const names[] = {"H2D copy", "D2H copy", "D2D copy"};
  Stream* s = current_stream(dev.index());
  const auto from = find_use(src, false), to = find_use(dst, true);
  const auto& host = dir == kH2D ? from : to;
  std::shared_ptr<void> keep;
  if (dir != kD2D && !(host && host->block->own)) keep = std::make_shared<Tensor>((dir == kH2D ? src : dst).detach());
  std::vector<Use> uses;
  if (from) uses.push_back(*from);
  if (to) uses.push_back(*to);
  // As CUDA does: a copy between devices runs on the source's current stream, in order with the target's on both sides.
  Stream* peer = dir == kD2D && dst.device() != dev ? current_stream(dst.device().index()) : nullptr;
  if (peer) R().stream_waits(s, R().record(peer));
  const size_t n = src.numel() * src.itemsize();
  R().copy(s, dir, dst.mutable_data_ptr(), src.const_data_ptr(), n, std::move(uses), names[dir], std::move(keep),
           dir == kH2D && !host && n <= kInlineBytes);
  if (peer) R().stream_waits(peer, R().record(s));
  if (dir != kD2D && !(non_blocking && host)) R().sync_stream(s);
}

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  const bool from_sim = is_sim(src), to_sim = is_sim(dst);
  const Direction dir = !from_sim ? kH2D : !to_sim ? kD2H : kD2D;
  const Device dev = from_sim ? src.device() : dst.device();
  const Tensor s = src.sizes() == dst.sizes() ? src : src.expand(dst.sizes());
  const bool raw = s.dtype() == dst.dtype() && s.is_conj() == dst.is_conj() && s.is_neg() == dst.is_neg() &&
                   s.is_non_overlapping_and_dense() && s.strides() == dst.strides();
  const bool within = dir == kD2D && src.device() == dst.device();
  if (raw && (!within || tl_stream[dev.index()] != 0)) {
    move(s, dst, non_blocking, dir, dev);
    return dst;
  }
  if (within) {  // an ordinary kernel
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    torch::jit::Stack stack{dst, s, non_blocking};
    kernel(op, &stack);
    return dst;
  }
  // Layout or dtype differ across the link: convert at the source, move, spread at the destination.
  const Tensor packed = s.to(dst.scalar_type()).resolve_conj().resolve_neg().contiguous();
  if (dst.is_contiguous() && !dst.is_conj() && !dst.is_neg()) {
    move(packed, dst, non_blocking, dir, dev);
  } else {
    const Tensor landed = at::empty(dst.sizes(), dst.options());
    move(packed, landed, to_sim && non_blocking, dir, dev);
    dst.copy_(landed);
  }
  return dst;
}
Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  const_cast<Tensor&>(dst).resize_(src.sizes());
  return copy_from(src, dst, false);
}
void record_stream(Tensor& t, c10::Stream s) { g_device_allocator.recordStream(t.storage().data_ptr(), s); }
bool compatible(const Tensor&, const Tensor&) { return true; }  // so that `param.data = x` and module.to() cross devices in place

// ---- autocast, from torch's own lists ---------------------------------------------------------------------------------------------
enum class Cast { Low, Fp32, ResultFp32, Widest };

at::ScalarType widest_of(const torch::jit::Stack& stack, size_t base) {
  auto widest = at::autocast::get_autocast_dtype(kSim);
  auto see = [&](const Tensor& t) {
    if (t.defined()) widest = at::autocast::prioritize(widest, t, kSim);
  };
  for (size_t i = base; i < stack.size(); i++) {
    if (stack[i].isTensor()) see(stack[i].toTensor());
    else if (stack[i].isTensorList())
      for (const Tensor& t : stack[i].toTensorList()) see(t);
  }
  return widest;
}
void cast(c10::IValue& v, at::ScalarType to) {
  if (v.isTensor()) {
    v = at::autocast::cached_cast(to, v.toTensor(), kSim);
  } else if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorList()) out.push_back(at::autocast::cached_cast(to, t, kSim));
    v = std::move(out);
  }
}
template <Cast kind>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t n = arguments.size(), base = stack->size() - n;
  if (kind == Cast::ResultFp32) {
    const auto& first = (*stack)[base];
    const bool eligible = first.isTensor() && at::autocast::is_eligible(first.toTensor(), kSim) && first.toTensor().is_floating_point();
    for (size_t i = 0; i < n && eligible; i++)
      if (arguments[i].name() == "dtype" && (*stack)[base + i].isNone()) (*stack)[base + i] = at::kFloat;
  } else {
    const auto to = kind == Cast::Fp32 ? at::kFloat : kind == Cast::Low ? at::autocast::get_autocast_dtype(kSim) : widest_of(*stack, base);
    for (size_t i = 0; i < n; i++) cast((*stack)[base + i], to);
  }
  op.callBoxed(stack);
}

// ---- autograd, for the operators that are composite elsewhere and kernels here ------------------------------------------------------
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool causal,
                 std::optional<double> scale, bool gqa) {
  auto recorded = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  if (!c10::GradMode::is_enabled() || !(recorded(q) || recorded(k) || recorded(v) || (mask && recorded(*mask)))) {
    at::AutoDispatchBelowAutograd below;
    return at::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, gqa);
  }
  std::optional<Tensor> bias = mask;
  if (mask && mask->scalar_type() == at::kBool)
    bias = at::zeros_like(*mask, q.options()).masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  const auto flash = static_cast<int64_t>(at::SDPBackend::flash_attention);
  const bool plain = !gqa && !(mask && recorded(*mask));
  if (plain && at::_fused_sdp_choice(q, k, v, bias, dropout, causal, scale, gqa) == flash)  // as the CPU would
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, bias, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale, gqa));
}
void without_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto recorded = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  for (size_t i = stack->size() - op.schema().arguments().size(); c10::GradMode::is_enabled() && i < stack->size(); i++) {
    const auto& v = (*stack)[i];
    bool any = v.isTensor() && recorded(v.toTensor());
    if (v.isTensorList())
      for (const Tensor& t : v.toTensorList()) any |= recorded(t);
    TORCH_CHECK_NOT_IMPLEMENTED(!any, "sim: ", op.schema().name(), " has no backward pass on this device; call it under torch.no_grad()");
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// ---- registrations ----------------------------------------------------------------------------------------------------------------
constexpr const char* kRecurrent[] = {"lstm.input",     "lstm.data",     "gru.input",     "gru.data",
                                      "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"};
torch::CppFunction boxed_function() { return torch::CppFunction::makeFromBoxedFunction<&boxed>(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed_function()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &compatible);
  static const std::set<std::string> own = {
      "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "_copy_from", "_copy_from_and_resize",
      "record_stream",
      "native_channel_shuffle", "mish_backward", "silu_backward"};  // composite: torch refuses or decomposes them
  // The fallback alone would not do: composite kernels win over it, and give other bits than the CPU's.
  for (const auto& n : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (n.name.rfind("aten::", 0) != 0) continue;
    const std::string name = n.name.substr(6) + (n.overload_name.empty() ? "" : "." + n.overload_name);
    if (!own.count(name)) m.impl(name.c_str(), boxed_function());
  }
  for (const char* name : {"convolution", "convolution_backward", "scaled_dot_product_attention"})  // these branch on the device's type
    m.impl(name, boxed_function());
  for (const char* name : kRecurrent) m.impl(name, boxed_function());
}
// Else torch's fallback resolves the source by cloning it, which copies it, which resolves it ... until the stack ends.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &compatible);
  m.impl("scaled_dot_product_attention", &attention);
  for (const char* name : kRecurrent) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&without_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#define SIM_NAME1(op) #op
#define SIM_NAME2(op, overload) #op "." #overload
#define SIM_PICK(_1, _2, N, ...) N
#define SIM_CAST(kind, ...)                                        \
  m.impl(SIM_PICK(__VA_ARGS__, SIM_NAME2, SIM_NAME1)(__VA_ARGS__), \
         torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kind>>());
#define SIM_LOW(...) SIM_CAST(Low, __VA_ARGS__)
#define SIM_FP32(...) SIM_CAST(Fp32, __VA_ARGS__)
#define SIM_RESULT_FP32(...) SIM_CAST(ResultFp32, __VA_ARGS__)
#define SIM_WIDEST(...) SIM_CAST(Widest, __VA_ARGS__)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOW)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_RESULT_FP32)
  AT_FORALL_PROMOTE(SIM_WIDEST)
  for (const char* name : {"cat", "stack"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::Widest>>());
  for (const char* name : {"norm.Scalar", "norm.ScalarOpt_dim"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::Fp32>>());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Collectives go to the group's gloo backend. This overrides torch's own entries, of which torch would warn.
void own_collectives() {
  struct Quiet : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard g(&quiet);
  static torch::Library m(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& n : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CPU))
    if (n.name.rfind("c10d::", 0) == 0 && n.overload_name.empty()) m.impl(n.name.substr(6).c_str(), boxed_function());
}

// ---- Python -----------------------------------------------------------------------------------------------------------------------
namespace py = pybind11;

const char* intern(const std::string& s) {
  static std::set<std::string> names;
  return names.insert(s).first->c_str();
}

void configure(const py::dict& d) {  // every setting, checked by the caller
  auto& r = R();
  const bool virtual_time = d["mode"].cast<std::string>() == "virtual";
  if (virtual_time != r.cfg.virtual_time) r.drain_all();
  const auto races = d["races"].cast<std::string>();
  std::lock_guard<std::mutex> l(r.mu);
  auto& c = r.cfg;
  c.virtual_time = virtual_time;
  c.races = races == "off" ? Races::Off : races == "raise" ? Races::Raise : Races::Record;
  c.poison = d["poison"].cast<bool>();
  c.devices = d["devices"].cast<int>();
  if (tl_device >= c.devices) tl_device = 0;
  c.capacity = d["capacity"].cast<size_t>();
  c.pinned_capacity = d["pinned_capacity"].cast<size_t>();
  c.bandwidth[kH2D] = d["h2d_gbps"].cast<double>() * 1e9;
  c.bandwidth[kD2H] = d["d2h_gbps"].cast<double>() * 1e9;
  c.copy_latency = d["copy_latency"].cast<double>();
  c.launch = d["launch"].cast<double>();
  c.flops = d["flops"].cast<double>();
  c.memory = d["memory_gbps"].cast<double>() * 1e9;
  c.collective = d["collective_gbps"].cast<double>() * 1e9;
  c.collective_latency = d["collective_latency"].cast<double>();
  c.fail_alloc_in = d["fail_alloc_in"].cast<int64_t>();
  c.fail_pin_in = d["fail_pin_in"].cast<int64_t>();
}
// What these return becomes Python objects once the lock is free: making them may run Python's collector, which may free device memory.
using RaceRow = std::tuple<std::string, std::string, std::string, std::string, std::string, std::string, int, size_t, size_t, size_t>;
using SpanRow = std::tuple<std::string, int, int64_t, double, double, size_t>;

std::map<std::string, size_t> memory(int dev) {  // -1: pinned memory
  std::lock_guard<std::mutex> l(R().mu);
  const auto& m = dev < 0 ? R().pinned : R().memory[dev];
  return {{"allocated", m.allocated}, {"peak", m.allocated_peak}, {"count", m.since_reset}};
}
std::pair<int64_t, int64_t> countdowns() {
  std::lock_guard<std::mutex> l(R().mu);
  return {R().cfg.fail_alloc_in, R().cfg.fail_pin_in};
}
void reset_peak(int dev) {  // -1: pinned memory
  if (dev >= 0) return g_device_allocator.resetPeakStats(dev);
  std::lock_guard<std::mutex> l(R().mu);
  R().pinned.allocated_peak = R().pinned.allocated;
}
void reset_counters() {
  auto& r = R();
  for (int i = 0; i < kMaxDevices; i++) reset_peak(i);
  reset_peak(-1);
  std::lock_guard<std::mutex> l(r.mu);
  for (auto& n : r.copied) n = 0;
  for (auto& m : r.memory) m.since_reset = 0;
  r.pinned.since_reset = 0;
}
std::vector<RaceRow> races() {
  std::lock_guard<std::mutex> l(R().mu);
  std::vector<RaceRow> out;
  for (const auto& r : R().races)
    out.emplace_back(r.message, r.kind, r.first, r.first_on, r.second, r.second_on, r.dev, r.nbytes, r.lo, r.hi);
  return out;
}
void reset_races() {
  std::lock_guard<std::mutex> l(R().mu);
  R().races.clear();
  R().graves.clear();
  R().race_count = 0;
}
size_t start_trace() {
  std::lock_guard<std::mutex> l(R().mu);
  if (R().tracing++ == 0) R().spans.clear();
  return R().spans.size();
}
std::vector<SpanRow> stop_trace(size_t from) {
  R().drain_all();
  std::lock_guard<std::mutex> l(R().mu);
  R().tracing--;
  std::vector<SpanRow> out;
  for (size_t i = from; i < R().spans.size(); i++) {
    const auto& s = R().spans[i];
    out.emplace_back(s.what, s.dev, s.stream, s.start, s.end, s.bytes);
  }
  return out;
}
void host_touch(uintptr_t p, size_t n, bool write, const std::string& what) {
  auto* at = reinterpret_cast<char*>(p);
  if (auto b = R().find_pin(at)) R().host_touch(*b, at - b->ptr, at - b->ptr + n, write, intern(what));
}
py::object rng_state(int dev) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(default_generator(dev).get_state())); }
void set_rng_state(const py::object& state, int dev) {
  TORCH_CHECK_TYPE(THPVariable_Check(state.ptr()), "sim: a generator's state is a tensor");
  default_generator(dev).set_state(THPVariable_Unpack(state.ptr()));
}
void seed_all(uint64_t seed) {
  for (int i = 0; i < R().cfg.devices; i++) default_generator(i).set_current_seed(seed);
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  static Hooks hooks;
  c10::SetAllocator(kSim, &g_device_allocator, 0);
  at::setHostAllocator(kSim, &g_pinned_allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  own_collectives();

  m.def("configure", &configure);
  m.def("countdowns", &countdowns);
  m.def("memory", &memory);
  m.def("reset_peak", &reset_peak);
  m.def("reset_counters", &reset_counters);
  m.def("copied", [](int direction) {
    std::lock_guard<std::mutex> l(R().mu);
    return R().copied[direction];
  });
  m.def("clock", [] { return R().now(); });
  m.def("races", &races);
  m.def("race_count", [] {
    std::lock_guard<std::mutex> l(R().mu);
    return R().race_count;
  });
  m.def("reset_races", &reset_races);
  m.def("start_trace", &start_trace);
  m.def("stop_trace", &stop_trace);
  m.def("drain", [] { R().drain_all(); });
  m.def("spin", [](double seconds) { R().spin(current_stream(tl_device), seconds); });
  m.def("host_work", [](double seconds) { R().host_work(seconds); });
  m.def("host_register", [](uintptr_t p, size_t n) { R().host_register(reinterpret_cast<char*>(p), n); });
  m.def("host_unregister", [](uintptr_t p) { R().host_unregister(reinterpret_cast<char*>(p)); });
  m.def("host_touch", &host_touch);
  m.def("bad_fork", [] { return R().forked; });
  m.def("seed_all", &seed_all);
  m.def("rng_state", &rng_state);
  m.def("set_rng_state", &set_rng_state);
  m.def("set_device", [](int dev) {
    check_device(dev);
    tl_device = dev;
  });
  m.def("current_device", [] { return static_cast<int>(tl_device); });
  m.def("device_count", [] { return R().cfg.devices; });
}
