// What torch asks of a device: current device and stream, allocators, the device guard, generators, hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime.h"

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);

Runtime& R() { return Runtime::get(); }

// ---- the calling thread's device and streams ---------------------------------------------------------------------------
thread_local DeviceIndex tl_device = 0;
thread_local int64_t tl_stream[kMaxDevices] = {};

Stream* current_stream(int dev) { return R().stream(dev, tl_stream[dev]); }
Stream* stream_of(const c10::Stream& s) { return R().stream(s.device_index(), s.id()); }
c10::Stream as_torch(int dev, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, Device(kSim, dev), id); }
int index_of(Device d) { return d.has_index() ? d.index() : tl_device; }
void check_device(int dev) {
  TORCH_CHECK(dev >= 0 && dev < R().cfg.devices, "sim: invalid device index ", dev, ", there are ", R().cfg.devices, " devices");
}

// ---- allocators --------------------------------------------------------------------------------------------------------
struct Handle {  // what a DataPtr's context points to
  BlockP block;
};
void free_device(void* context) {
  auto* h = static_cast<Handle*>(context);
  R().free_block(h->block);
  delete h;
}
void free_pinned(void* context) {
  auto* h = static_cast<Handle*>(context);
  R().free_pinned(h->block);
  delete h;
}
c10::DataPtr empty_data(Device d) { return {nullptr, nullptr, &c10::detail::deleteNothing, d}; }
c10::DataPtr wrap_block(BlockP b, int dev) {
  void* p = b->ptr;
  return {p, new Handle{std::move(b)}, &free_device, Device(kSim, dev)};
}

struct DeviceAllocator final : c10::DeviceAllocator {
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  c10::DataPtr allocate(size_t n) override {
    const int dev = tl_device;
    if (n == 0) return empty_data(Device(kSim, dev));
    return wrap_block(R().alloc(dev, current_stream(dev), n, nullptr, nullptr), dev);
  }
  void copy_data(void* dst, const void* src, size_t n) const override { std::memcpy(dst, src, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> l(R().mu);
    R().reap_locked();
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    if (auto* h = p.cast_context<Handle>(&free_device)) R().record_stream(h->block, stream_of(s));
  }
  static void set(c10::CachingAllocator::StatArray& to, int64_t current, int64_t peak, int64_t allocated, int64_t freed) {
    auto& s = to[0];
    s.current = current;
    s.peak = peak;
    s.allocated = allocated;
    s.freed = freed;
  }
  Stats getDeviceStats(DeviceIndex dev) override {
    std::lock_guard<std::mutex> l(R().mu);
    const auto& m = R().memory[dev];
    Stats s;
    set(s.allocated_bytes, m.allocated, m.allocated_peak, m.total, m.freed);
    set(s.requested_bytes, m.allocated, m.allocated_peak, m.total, m.freed);
    set(s.active_bytes, m.active, m.active_peak, m.total, m.freed);
    set(s.reserved_bytes, m.active, m.active_peak, m.total, m.freed);
    set(s.allocation, m.live, m.live_peak, m.count, m.count - m.live);
    s.num_ooms = m.ooms;
    s.num_device_alloc = m.count;
    return s;
  }
  void resetAccumulatedStats(DeviceIndex dev) override {
    std::lock_guard<std::mutex> l(R().mu);
    R().memory[dev].total = R().memory[dev].freed = 0;
  }
  void resetPeakStats(DeviceIndex dev) override {
    std::lock_guard<std::mutex> l(R().mu);
    auto& m = R().memory[dev];
    m.allocated_peak = m.allocated;
    m.active_peak = m.active;
    m.live_peak = m.live;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex dev) override {
    std::lock_guard<std::mutex> l(R().mu);
    const size_t total = R().cfg.capacity ? R().cfg.capacity : size_t(64) << 30;
    return {total - std::min(total, R().memory[dev].active), total};
  }
};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    auto b = R().alloc_pinned(n);
    void* p = b->ptr;
    return {p, new Handle{std::move(b)}, &free_pinned, Device(c10::kCPU)};
  }
  void copy_data(void* dst, const void* src, size_t n) const override { std::memcpy(dst, src, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    std::lock_guard<std::mutex> l(R().mu);
    R().pinned.allocated_peak = R().pinned.allocated;
  }
};
DeviceAllocator g_device_allocator;
PinnedAllocator g_pinned_allocator;

// ---- the guard: devices, streams, events ---------------------------------------------------------------------------------
struct Event {
  MarkerP marker;
};
MarkerP marker_of(void* event) { return static_cast<Event*>(event)->marker; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    const auto old = tl_device;
    setDevice(d);
    return Device(kSim, old);
  }
  Device getDevice() const override { return Device(kSim, tl_device); }
  void setDevice(Device d) const override {
    check_device(d.index());
    tl_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { tl_device = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return R().cfg.devices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  c10::Stream getStream(Device d) const override { return as_torch(index_of(d), tl_stream[index_of(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return as_torch(index_of(d), 0); }
  c10::Stream getNewStream(Device d, int) const override {
    check_device(index_of(d));
    return as_torch(index_of(d), R().new_stream(index_of(d))->id);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto old = getStream(s.device());
    tl_stream[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return stream_of(s); }
  bool queryStream(const c10::Stream& s) const override { return R().query_stream(stream_of(s)); }
  void synchronizeStream(const c10::Stream& s) const override { R().sync_stream(stream_of(s)); }
  void synchronizeDevice(const DeviceIndex d) const override { R().sync_device(d); }

  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->marker = R().record(stream_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) R().stream_waits(stream_of(s), marker_of(event));
  }
  bool queryEvent(void* event) const override { return !event || R().query(marker_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) R().host_waits(marker_of(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    TORCH_CHECK(a && b, "sim: elapsed_time needs two recorded events");
    const auto first = marker_of(a), last = marker_of(b);
    TORCH_CHECK(first->is_done() && last->is_done(), "sim: elapsed_time needs two completed events");
    const bool v = R().is_virtual();
    return 1e3 * (v ? last->virtual_time - first->virtual_time : last->wall_time - first->wall_time);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { g_device_allocator.recordStream(p, s); }
};

// ---- generators: a CPU generator under the device's name, so that one seed gives the CPU's numbers -----------------------------
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(DeviceIndex d, at::Generator g = {})
      : c10::GeneratorImpl(Device(kSim, d), kSimKeys), cpu(g.defined() ? std::move(g) : at::detail::createCPUGenerator()) {}
  static c10::DeviceType device_type() { return kSim; }
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(s); }
  void set_offset(uint64_t o) override { cpu.set_offset(o); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), cpu.clone()); }
};
at::Generator& default_generator(DeviceIndex dev) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMaxDevices; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(dev < 0 ? tl_device : dev);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return R().cfg.devices; }
  DeviceIndex getCurrentDevice() const override { return tl_device; }
  void setCurrentDevice(DeviceIndex d) const override {
    check_device(d);
    tl_device = d;
  }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    const auto old = tl_device;
    if (d >= 0) setCurrentDevice(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return R().find_pin(p) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? tl_device : d); }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, tl_device); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    c10::DeviceGuard g(s.device());
    auto fresh = g_device_allocator.allocate(n);
    current_stream(s.device().index())->drain();
    if (n && s.nbytes()) std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    auto* impl = s.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};

}  // namespace
}  // namespace sim
