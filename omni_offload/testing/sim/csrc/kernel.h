// The one kernel behind every operator: device memory is lent to torch's own CPU kernel as CPU tensors, without a copy, and what the
// CPU kernel made is taken over by the device. Results therefore equal the CPU's bit for bit.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "device.h"

namespace sim {
namespace {

using at::Tensor;

bool is_sim(const Tensor& t) { return t.device().type() == kSim; }

BlockP block_of(const c10::Storage& s) {
  auto* h = s.data_ptr().cast_context<Handle>(s.device_type() == kSim ? &free_device : &free_pinned);
  return h ? h->block : nullptr;
}

// The bytes of a block from a tensor's first element to its last.
Use use_of(const Tensor& t, BlockP b, bool write) {
  if (t.numel() == 0) return {std::move(b), 0, 0, write};
  int64_t lo = t.storage_offset(), hi = lo + 1;
  for (int64_t i = 0; i < t.dim(); i++) (t.stride(i) < 0 ? lo : hi) += t.stride(i) * (t.size(i) - 1);
  const int64_t base = static_cast<const char*>(t.storage().data()) - b->ptr, item = t.itemsize();
  return {std::move(b), static_cast<size_t>(base + lo * item), static_cast<size_t>(base + hi * item), write};
}

// As `use_of`, where there is a block; a CPU tensor's may be registered memory, if all of the tensor lies in it.
std::optional<Use> find_use(const Tensor& t, bool write) {
  auto b = block_of(t.storage());
  const bool search = !b && t.device().type() == c10::kCPU && t.numel();
  if (search) b = R().find_pin(t.const_data_ptr());
  if (!b) return std::nullopt;
  auto use = use_of(t, std::move(b), write);
  if (search && (use.hi > use.block->nbytes || use.lo > use.hi)) return std::nullopt;
  return use;
}

Tensor tensor_on(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return t;
}
c10::Storage make_storage(size_t n, c10::DataPtr data, c10::Allocator* allocator) {
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), n, std::move(data), allocator, /*resizable=*/true));
}
c10::Storage lend(const c10::Storage& s) {  // the same memory as a CPU storage
  return make_storage(s.nbytes(), c10::DataPtr(const_cast<void*>(s.data()), Device(c10::kCPU)), c10::GetCPUAllocator());
}
c10::Storage adopt(const c10::Storage& s, Device d) {  // takes over a CPU storage that a kernel has just made
  const size_t n = s.nbytes();
  if (n == 0) return make_storage(0, empty_data(d), &g_device_allocator);
  auto b = R().alloc(d.index(), current_stream(d.index()), n, s.mutable_data(), std::make_shared<c10::Storage>(s));
  return make_storage(n, wrap_block(std::move(b), d.index()), &g_device_allocator);
}

// ---- what is known of an operator --------------------------------------------------------------------------------------------
enum class Flop { None, Matmul, Addmm, Attention, Convolution };
enum class Traffic { None, AllReduce, AllGather, ReduceScatter, AllToAll, Scatter, Gather, Whole };
struct OpInfo {
  const char* name;
  bool mixes;       // takes CPU tensors beside the device's
  bool host_reads;  // the host needs the result before it can go on
  bool view;        // neither reads nor writes elements
  bool collective;
  Traffic traffic;
  Flop flop;
  std::optional<size_t> generator;  // which argument is one
};

bool is_view(const c10::FunctionSchema& schema) {
  bool aliases = false;
  for (const auto& r : schema.returns()) {
    if (!r.alias_info() || r.alias_info()->isWrite()) return false;
    aliases = true;
  }
  return aliases;
}
std::optional<size_t> generator_of(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); i++)
    if (schema.arguments()[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) return i;
  return std::nullopt;
}
Traffic traffic_of(const std::string& name) {
  static const std::pair<const char*, Traffic> known[] = {  // the first that is found in the name
      {"barrier", Traffic::None},          {"allreduce", Traffic::AllReduce}, {"allgather", Traffic::AllGather},
      {"reduce_scatter", Traffic::ReduceScatter}, {"alltoall", Traffic::AllToAll},   {"scatter", Traffic::Scatter},
      {"gather", Traffic::Gather}};
  for (const auto& [part, traffic] : known)
    if (name.find(part) != std::string::npos) return traffic;
  return Traffic::Whole;  // broadcast, reduce, send, receive
}
OpInfo describe(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> mixed = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::copy_",
      "aten::set_", "aten::is_set_to", "aten::tensor_split", "aten::_pack_padded_sequence"};
  static const std::unordered_map<std::string, Flop> flops = {
      {"aten::mm", Flop::Matmul}, {"aten::bmm", Flop::Matmul}, {"aten::addmm", Flop::Addmm}, {"aten::baddbmm", Flop::Addmm},
      {"aten::scaled_dot_product_attention", Flop::Attention}, {"aten::convolution", Flop::Convolution}};
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto f = flops.find(name);
  return {name.c_str(), mixed.count(name) > 0,
          op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape), is_view(schema),
          name.rfind("c10d::", 0) == 0, traffic_of(name), f == flops.end() ? Flop::None : f->second, generator_of(schema)};
}
const OpInfo& info_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, OpInfo> cache;
  const auto* key = &op.schema();
  const auto it = cache.find(key);
  return it != cache.end() ? it->second : cache.emplace(key, describe(op)).first->second;
}

// ---- one call ------------------------------------------------------------------------------------------------------------------
struct Call {
  struct Arg {
    Tensor real, lent;
    bool write;
  };
  const OpInfo& op;
  c10::SmallVector<Arg, 8> args;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 8> storages;  // CPU's and device's, of one memory
  c10::SmallVector<Use, 8> uses;
  c10::SmallVector<Tensor, 4> operands;  // by position, for the FLOP count
  std::optional<Device> device, asked;   // where it runs; what a device argument says
  bool host_tensor = false;
  double bytes = 0, written = 0;
  int ranks = 1;  // of the group of a collective

  explicit Call(const OpInfo& op) : op(op) {}

  void on(Device d) {
    if (!device) device = d;
    TORCH_CHECK(*device == d, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", d,
                "! (in ", op.name, ")");
  }
  c10::Storage lent_storage(const c10::Storage& s) {
    for (auto& [cpu, real] : storages)
      if (real.is_alias_of(s)) return cpu;
    storages.emplace_back(lend(s), s);
    return storages.back().first;
  }
  c10::Storage real_storage(const c10::Storage& s) {
    for (auto& [cpu, real] : storages)
      if (cpu.is_alias_of(s)) return real;
    bytes += s.nbytes();
    storages.emplace_back(s, adopt(s, *device));
    return storages.back().second;
  }
  Tensor take(const Tensor& t, bool write) {
    if (!t.defined()) return t;
    if (op.flop != Flop::None) operands.push_back(t);
    if (!is_sim(t)) {  // a number in a 0-dim CPU tensor may be read
      host_tensor |= t.device().type() == c10::kCPU && (t.dim() > 0 || write) && !op.mixes;
      return t;
    }
    on(t.device());
    for (auto& a : args)
      if (a.real.is_same(t)) {
        a.write |= write;
        return a.lent;
      }
    Tensor lent = tensor_on(lent_storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) lent.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (auto b = op.view ? nullptr : block_of(t.storage())) {
      uses.push_back(use_of(t, std::move(b), write));
      bytes += uses.back().hi - uses.back().lo;
      if (write) written += uses.back().hi - uses.back().lo;
    }
    args.push_back({t, lent, write});
    return lent;
  }
  void take(c10::IValue& v, bool write);
  void lend_generator(c10::IValue& v) const;
  void take_all(const c10::FunctionSchema& schema, torch::jit::Stack& stack);

  Tensor give(const Tensor& t) {
    if (!t.defined() || t.device().type() != c10::kCPU) return t;
    for (auto& a : args)
      if (a.lent.is_same(t)) return a.real;
    return tensor_on(real_storage(t.storage()), kSimKeys, t);
  }
  void give(c10::IValue& v) {
    if (v.isTensor()) {
      v = give(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& t : v.toTensorList()) out.push_back(give(t));
      v = std::move(out);
    }
  }
  // The kernel may have resized an argument, given it another storage, or grown its storage.
  void write_back() {
    for (auto& a : args) {
      if (!a.write) continue;
      auto* lent = a.lent.unsafeGetTensorImpl();
      auto* real = a.real.unsafeGetTensorImpl();
      const c10::Storage want = real_storage(lent->storage());
      if (!want.is_alias_of(a.real.storage())) real->set_storage_keep_dtype(want);
      else if (lent->storage().data() != real->storage().data() || lent->storage().nbytes() != real->storage().nbytes())
        regrow(*real->storage().unsafeGetStorageImpl(), adopt(lent->storage(), a.real.device()));
      if (lent->sizes() != real->sizes() || lent->strides() != real->strides() || lent->storage_offset() != real->storage_offset())
        real->set_sizes_and_strides(lent->sizes(), lent->strides(), lent->storage_offset());
    }
  }
  static void regrow(c10::StorageImpl& impl, c10::Storage grown) {  // same storage object, new memory
    const auto n = grown.nbytes();
    const auto device = grown.device();
    impl.set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr(nullptr, device)));
    impl.set_nbytes(n);
  }
  double flop(const c10::IValue* result) const {
    const auto& a = operands;
    switch (op.flop) {
      case Flop::Matmul: return a.size() < 2 ? 0 : 2.0 * a[0].numel() * a[1].size(-1);
      case Flop::Addmm: return a.size() < 3 ? 0 : 2.0 * a[1].numel() * a[2].size(-1);
      case Flop::Attention: return a.size() < 2 ? 0 : 4.0 * a[0].numel() * a[1].size(-2);
      case Flop::Convolution: return a.size() < 2 ? 0 : 2.0 * result->toTensor().numel() * a[1].numel() / std::max<int64_t>(1, a[1].size(0));
      case Flop::None: break;
    }
    return 0;
  }
};

void Call::take(c10::IValue& v, bool write) {
  if (v.isTensor()) {
    v = take(v.toTensor(), write);
  } else if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorList()) out.push_back(take(t, write));
    v = std::move(out);
  } else if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : v.toOptionalTensorList()) out.push_back(t ? std::optional<Tensor>(take(*t, write)) : t);
    v = std::move(out);
  } else if (op.collective && v.isList() && v.toList().elementType()->kind() == c10::TypeKind::ListType) {  // Tensor[][]
    auto out = c10::impl::GenericList(c10::ListType::ofTensors());
    for (const c10::IValue& inner : v.toListRef()) {
      c10::List<Tensor> lent;
      for (const Tensor& t : inner.toTensorVector()) lent.push_back(take(t, write));
      out.push_back(std::move(lent));
    }
    v = std::move(out);
  } else if (v.isDevice()) {
    asked = v.toDevice();
    if (asked->type() != kSim) return;
    asked = Device(kSim, index_of(*asked));
    v = Device(c10::kCPU);
  } else if (v.isStorage()) {
    const auto s = v.toStorage();
    if (s.device_type() != kSim) return;
    on(s.device());
    v = lent_storage(s);
  }
}
void Call::lend_generator(c10::IValue& v) const {
  if (!device) return;
  const auto g = v.isGenerator() ? v.toGenerator() : default_generator(device->index());
  TORCH_CHECK(g.device().type() == kSim, "Expected a 'sim' device type for generator but found '", g.device().type(), "'");
  v = static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu;
}
void Call::take_all(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const size_t n = schema.arguments().size(), base = stack.size() - n;
  for (size_t i = 0; i < n; i++) {
    const auto& arg = schema.arguments()[i];
    // Schemas of collectives do not say what is written: their names do.
    const bool write = op.collective ? arg.name().rfind("output", 0) == 0 || arg.name() == "tensors"
                                     : arg.alias_info() && arg.alias_info()->isWrite();
    take(stack[base + i], write);
    if (op.collective && arg.name() == "process_group") ranks = stack[base + i].toCustomClass<c10d::ProcessGroup>()->getSize();
  }
  if (asked && asked->type() == kSim) device = asked;
  if (op.generator) lend_generator(stack[base + *op.generator]);
  TORCH_CHECK(device, "sim: ", op.name, " reached the device without a device tensor");
  TORCH_CHECK(!host_tensor, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
              " and cpu! (in ", op.name, ")");
}

// ---- collectives ------------------------------------------------------------------------------------------------------------------
// A collective runs on a hidden stream of its device; wait() orders the caller's current stream after it.
struct Work final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  MarkerP marker;
  int dev;
  double due;                  // wall seconds
  std::vector<Tensor> stash;   // inputs and outputs live until wait(), as with NCCL

  Work(c10::intrusive_ptr<c10d::Work> inner, MarkerP marker, int dev, double due, std::vector<Tensor> stash)
      : inner(std::move(inner)), marker(std::move(marker)), dev(dev), due(due), stash(std::move(stash)) {}
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  int sourceRank() const override { return inner->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { inner->abort(); }
  std::vector<Tensor> result() override { return inner->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner->getFuture(); }
  bool wait(std::chrono::milliseconds timeout) override {
    bool ok = false;
    {
      NoGil g;
      ok = inner->wait(timeout);
      if (!R().is_virtual()) sleep_seconds(due - wall());
    }
    R().stream_waits(current_stream(dev), marker);
    stash.clear();
    return ok;
  }
};

// Bytes that a rank sends, or receives, over its link: those of the algorithms that take no more than they must (rings, and direct
// exchange); a broadcast and a reduction are pipelined from rank to rank.
double algorithm_bytes(const Call& c) {
  const double read = c.bytes - c.written, others = c.ranks - 1, share = others / c.ranks;
  switch (c.op.traffic) {
    case Traffic::AllReduce: return 2 * share * c.written;
    case Traffic::AllGather: case Traffic::AllToAll: return share * c.written;
    case Traffic::ReduceScatter: return share * read;
    case Traffic::Scatter: return others * c.written;
    case Traffic::Gather: return others * read;
    case Traffic::Whole: return others > 0 ? std::max(read, c.written) : 0;
    case Traffic::None: break;
  }
  return 0;
}

void finish_collective(Call& c, Stream* s, double start, torch::jit::Stack& stack, size_t results) {
  const double bytes = algorithm_bytes(c);
  const double duration = bytes > 0 ? R().cfg.collective_latency + over(bytes, R().cfg.collective) : 0;
  {
    std::lock_guard<std::mutex> l(R().mu);
    auto& busy_until = R().is_virtual() ? R().collective_free[s->dev] : R().collective_free_wall[s->dev];
    if (R().is_virtual()) {
      R().charge_locked(s, duration, busy_until, c.op.name, bytes);
    } else {
      start = std::max(start, busy_until);
      busy_until = start + duration;
      R().span_locked(s, c.op.name, start, start + duration, bytes);
    }
  }
  auto& v = stack.back();
  if (!results || !v.isCustomClass()) return;
  std::vector<Tensor> stash;
  for (auto& a : c.args) stash.push_back(a.real);
  v = c10::intrusive_ptr<c10d::Work>(
      c10::make_intrusive<Work>(v.toCustomClass<c10d::Work>(), R().record(s), s->dev, start + duration, std::move(stash)));
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------------
Stream* collective_stream(Stream* caller) {
  caller->drain();
  const auto after = R().record(caller);
  auto* s = R().stream(caller->dev, -1);
  R().stream_waits(s, after);
  return s;
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call c(info_of(op));
  c.take_all(schema, *stack);
  Stream* s = current_stream(c.device->index());
  if (c.op.collective) s = collective_stream(s);
  const uint64_t tick = c.op.view ? 0 : R().begin(s, c.uses.data(), c.uses.size(), c.op.name);
  const double start = wall();

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const size_t known = c.storages.size(), results = schema.returns().size(), base = stack->size() - results;
  c.write_back();
  const bool to_cpu = c.asked && c.asked->type() == c10::kCPU;
  for (size_t i = 0; i < results && !to_cpu; i++) c.give((*stack)[base + i]);
  if (R().cfg.races != Races::Off && c.storages.size() > known) {
    std::lock_guard<std::mutex> l(R().mu);
    for (size_t i = known; i < c.storages.size(); i++)
      if (auto b = block_of(c.storages[i].second)) R().touch_locked(*b, {0, b->nbytes, s->actor, tick, true, c.op.name}, s->clock);
  }
  if (c.op.collective) return finish_collective(c, s, start, *stack, results);
  if (c.op.view) return;
  R().end(s, start, c.bytes, c.op.flop == Flop::None ? 0 : c.flop(&(*stack)[base]), c.op.name);
  if (c.op.host_reads) R().sync_stream(s);
}

void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { kernel(op, stack); }

}  // namespace
}  // namespace sim
