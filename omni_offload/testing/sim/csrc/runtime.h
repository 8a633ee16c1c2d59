// The software accelerator without torch's operators: settings, time, ordering, races, copies and memory.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "order.h"

namespace sim {

constexpr int kMaxDevices = 8;
constexpr size_t kGranule = 512;       // device memory is charged in such units, as CUDA's caching allocator does
constexpr size_t kMaxRaces = 10000;    // more are counted, not kept
constexpr size_t kManyAccesses = 64;   // from here on a block's past is pruned
constexpr size_t kInlineBytes = 64 << 10;  // pageable host-to-device copies up to this size do not queue for the copy engine
constexpr double kMemcpyRate = 8e9;    // bytes/s: how long the host's own memcpy takes within a throttled copy

enum class Races { Off, Record, Raise };
enum Direction { kH2D, kD2H, kD2D, kDirections };

struct Settings {
  bool virtual_time = true;
  Races races = Races::Record;
  bool poison = true;
  int devices = 2;
  size_t capacity = 0, pinned_capacity = 0;              // bytes, 0: unlimited
  double bandwidth[kDirections] = {0, 0, 0};             // bytes/s, 0: unlimited
  double copy_latency = 0, launch = 0;                   // s
  double flops = 0, memory = 0, collective = 0;          // FLOP/s, bytes/s, bytes/s; 0: unlimited
  double collective_latency = 0;                         // s
  int64_t fail_alloc_in = -1, fail_pin_in = -1;          // so many succeed, then one fails; negative: off
};

inline double over(double amount, double rate) { return rate > 0 ? amount / rate : 0; }

// Virtual durations are multiples of 2^-40 s (about a picosecond): sums and differences of such doubles are exact up to 2^13 s, so that
// a program takes the same time to the last bit whenever it starts.
inline double exact(double seconds) { return std::ldexp(std::nearbyint(std::ldexp(seconds, 40)), -40); }

struct MemoryStats {
  size_t allocated = 0, allocated_peak = 0;  // held by live tensors
  size_t active = 0, active_peak = 0;        // and by freed ones that a recorded stream may still use
  size_t total = 0, freed = 0;
  size_t count = 0, live = 0, live_peak = 0, ooms = 0;
  size_t since_reset = 0;  // allocations
};

struct Span {
  const char* what;
  int dev;
  int64_t stream;
  double start, end;
  size_t bytes;
};

struct Race {
  std::string kind, first, first_on, second, second_on, message;
  size_t nbytes, lo, hi;
  int dev;  // -1: pinned host memory
};

// What was unordered with a block's home stream when the block was freed.
struct Grave {
  int dev;
  size_t nbytes;
  std::vector<Access> pending;
};

struct Runtime {
  Settings cfg;
  std::mutex mu;  // guards everything below
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<std::pair<int, int64_t>, Stream*> by_id;
  int64_t next_stream = 1;
  Clock host{1};
  double host_time = 0;  // virtual seconds
  double copy_free[kMaxDevices][kDirections] = {}, copy_free_wall[kMaxDevices][kDirections] = {};  // when an engine is free
  double compute_free[kMaxDevices] = {}, compute_free_wall[kMaxDevices] = {};
  double collective_free[kMaxDevices] = {}, collective_free_wall[kMaxDevices] = {};
  MemoryStats memory[kMaxDevices], pinned;
  std::map<const char*, BlockP> pins;  // pinned ranges by first byte
  std::vector<std::pair<BlockP, std::vector<MarkerP>>> deferred;  // freed, but recorded on streams
  std::map<Stream*, std::vector<Grave>> graves;
  std::vector<Race> races;
  uint64_t race_count = 0, next_uid = 1;
  uint64_t copied[kDirections] = {};
  int tracing = 0;
  std::vector<Span> spans;
  bool forked = false;

  // Leaked on purpose, with its streams: a process may end while copies are queued.
  static Runtime& get() {
    static Runtime* r = new Runtime();
    return *r;
  }
  Runtime() {
    pthread_atfork([] { get().mu.lock(); }, [] { get().mu.unlock(); },
                   [] {
                     get().forked = true;
                     get().mu.unlock();
                   });
  }
  void check_alive() const {
    TORCH_CHECK(!forked, "Cannot use sim in a forked subprocess: its streams' threads did not survive the fork. "
                         "Use the 'spawn' start method");
  }
  bool is_virtual() const { return cfg.virtual_time; }

  // ---- streams -------------------------------------------------------------------------------------------------------
  Stream* stream_locked(int dev, int64_t id) {
    auto it = by_id.find({dev, id});
    if (it != by_id.end()) return it->second;
    streams.push_back(std::make_unique<Stream>(dev, id, static_cast<int>(streams.size()) + 1));
    return by_id[{dev, id}] = streams.back().get();
  }
  Stream* stream(int dev, int64_t id) {
    std::lock_guard<std::mutex> l(mu);
    return stream_locked(dev, id);
  }
  Stream* new_stream(int dev) {
    std::lock_guard<std::mutex> l(mu);
    return stream_locked(dev, next_stream++);
  }
  std::vector<Stream*> streams_of(int dev) {  // -1: of every device
    std::lock_guard<std::mutex> l(mu);
    std::vector<Stream*> found;
    for (auto& s : streams)
      if (dev < 0 || s->dev == dev) found.push_back(s.get());
    return found;
  }
  // Waits until the queues are empty, without ordering anything for the checker or the virtual clock.
  void drain_all() {
    if (forked) return;
    for (auto* s : streams_of(-1)) s->drain();
  }

  // ---- races ---------------------------------------------------------------------------------------------------------
  std::string name_of(int actor) {
    if (actor == 0) return "host";
    const Stream* s = streams[actor - 1].get();
    const std::string on = "sim:" + std::to_string(s->dev);
    if (s->id == 0) return on + " default stream";
    if (s->id < 0) return on + " collective stream";
    return on + " stream " + std::to_string(s->id);
  }
  static std::string memory_name(int dev, size_t nbytes) {
    return std::to_string(nbytes) + " bytes of " + (dev < 0 ? std::string("pinned host memory") : "sim:" + std::to_string(dev));
  }
  // A new operation on a stream sees all that the host saw, and gets a tick of its own.
  uint64_t tick_locked(Stream* s) {
    join(s->clock, host);
    if (s->clock.size() <= static_cast<size_t>(s->actor)) s->clock.resize(s->actor + 1, 0);
    return ++s->clock[s->actor];
  }
  void report_locked(Race race) {
    race_count++;
    const std::string message = race.message;
    if (races.size() < kMaxRaces) races.push_back(std::move(race));
    TORCH_CHECK(cfg.races != Races::Raise, "sim race: ", message);
  }
  void unordered_locked(const Block& b, const Access& a, const Access& now) {
    Race r{std::string(a.write ? "write" : "read") + "-then-" + (now.write ? "write" : "read"),
           a.what, name_of(a.actor), now.what, name_of(now.actor), {}, b.nbytes,
           std::max(a.lo, now.lo), std::min(a.hi, now.hi), b.dev};
    r.message = r.kind + " with no wait between, of the bytes [" + std::to_string(r.lo) + ", " + std::to_string(r.hi) +
                ") of " + memory_name(b.dev, b.nbytes) + ": '" + r.first + "' on " + r.first_on + ", then '" + r.second +
                "' on " + r.second_on;
    report_locked(std::move(r));
  }
  // What the host knows is known to every later operation, and can race with none.
  void prune_locked(std::vector<Access>& past) {
    past.erase(std::remove_if(past.begin(), past.end(), [&](const Access& a) { return a.tick <= component(host, a.actor); }),
               past.end());
  }
  void touch_locked(Block& b, const Access& now, const Clock& seen) {
    if (cfg.races == Races::Off || now.hi <= now.lo) return;
    if (b.past.size() >= kManyAccesses) prune_locked(b.past);
    bool found = false;
    Access bad{};
    size_t kept = 0;
    for (const Access& a : b.past) {
      const bool overlaps = a.lo < now.hi && now.lo < a.hi;
      if (!found && overlaps && (now.write || a.write) && a.actor != now.actor && a.tick > component(seen, a.actor)) {
        found = true;
        bad = a;
      }
      const bool covered = a.lo >= now.lo && a.hi <= now.hi;
      if (!(covered && (now.write || (!a.write && a.actor == now.actor)))) b.past[kept++] = a;
    }
    b.past.resize(kept);
    if (now.actor != 0) b.past.push_back(now);
    if (found) unordered_locked(b, bad, now);
  }
  void touch_all_locked(const Use* uses, size_t n, Stream* s, uint64_t tick, const char* what) {
    for (size_t i = 0; i < n; i++)
      touch_locked(*uses[i].block, {uses[i].lo, uses[i].hi, s->actor, tick, uses[i].write, what}, s->clock);
  }
  void host_touch(Block& b, size_t lo, size_t hi, bool write, const char* what) {
    std::lock_guard<std::mutex> l(mu);
    touch_locked(b, {lo, hi, 0, ++host[0], write, what}, host);
  }
  // A freed block may be handed out again to its home stream: who else still used it then?
  void check_reuse_locked(Stream* s) {
    auto it = graves.find(s);
    if (it == graves.end()) return;
    join(s->clock, host);
    const auto dug = std::move(it->second);
    graves.erase(it);
    for (const auto& g : dug)
      for (const auto& a : g.pending) {
        if (a.tick <= component(s->clock, a.actor)) continue;
        Race r{"reuse-after-free", a.what, name_of(a.actor), "allocation", name_of(s->actor), {}, g.nbytes, a.lo, a.hi, g.dev};
        r.message = r.kind + ": " + memory_name(g.dev, g.nbytes) + " were freed while '" + r.first + "' on " + r.first_on +
                    " may still use them, and may now be handed out again on " + r.second_on +
                    " (no record_stream before, no wait since)";
        report_locked(std::move(r));
        break;
      }
  }

  // ---- time ----------------------------------------------------------------------------------------------------------
  double now() {
    if (!is_virtual()) return wall();
    std::lock_guard<std::mutex> l(mu);
    double t = host_time;
    for (auto& s : streams) t = std::max(t, s->virtual_time);
    return t;
  }
  void span_locked(const Stream* s, const char* what, double start, double end, size_t bytes) {
    if (tracing) spans.push_back({what, s->dev, s->id, start, end, bytes});
  }
  void charge_locked(Stream* s, double duration, double& engine_free, const char* what, size_t bytes) {
    host_time += exact(cfg.launch);
    const double start = std::max({s->virtual_time, host_time, engine_free});
    engine_free = s->virtual_time = start + exact(duration);
    span_locked(s, what, start, s->virtual_time, bytes);
  }

  // ---- events --------------------------------------------------------------------------------------------------------
  MarkerP record(Stream* s) {
    auto marker = std::make_shared<Marker>();
    {
      std::lock_guard<std::mutex> l(mu);
      join(s->clock, host);
      marker->clock = s->clock;
      if (is_virtual()) host_time += exact(cfg.launch);
      marker->virtual_time = std::max(s->virtual_time, host_time);
    }
    if (s->idle()) marker->fire();
    else s->push([marker] { marker->fire(); });
    return marker;
  }
  void stream_waits(Stream* s, const MarkerP& marker) {
    {
      std::lock_guard<std::mutex> l(mu);
      join(s->clock, marker->clock);
      if (is_virtual()) s->virtual_time = std::max(s->virtual_time, marker->virtual_time);
    }
    if (!marker->is_done()) s->push([marker] { marker->wait(); });
  }
  void host_waits(const MarkerP& marker) {
    if (!marker->is_done()) {
      NoGil g;
      marker->wait();
    }
    std::lock_guard<std::mutex> l(mu);
    join(host, marker->clock);
    if (is_virtual()) host_time = std::max(host_time, marker->virtual_time);
  }
  bool query(const MarkerP& marker) {
    if (!marker->is_done()) return false;
    std::lock_guard<std::mutex> l(mu);
    if (is_virtual()) {
      host_time += exact(cfg.launch);  // so that a loop that polls ends
      if (marker->virtual_time > host_time) return false;
    }
    join(host, marker->clock);
    return true;
  }
  bool query_stream(Stream* s) {
    if (!s->idle()) return false;
    std::lock_guard<std::mutex> l(mu);
    if (is_virtual()) {
      host_time += exact(cfg.launch);
      if (s->virtual_time > host_time) return false;
    }
    join(host, s->clock);
    return true;
  }
  void sync_stream(Stream* s) {
    s->drain();
    std::lock_guard<std::mutex> l(mu);
    join(host, s->clock);
    if (is_virtual()) host_time = std::max(host_time, s->virtual_time);
  }
  void sync_device(int dev) {
    check_alive();
    for (auto* s : streams_of(dev)) sync_stream(s);
  }

  // ---- work ----------------------------------------------------------------------------------------------------------
  double copy_duration(Direction dir, size_t n) const {
    return cfg.copy_latency + (dir == kD2D ? over(2.0 * n, cfg.memory) : over(n, cfg.bandwidth[dir]));
  }
  // Queues a copy; `keep` holds memory that is not ours until it is done. A small copy from pageable memory (`inlined`) travels with
  // the stream's commands, as CUDA documents for up to 64 KiB, and so does not queue for the copy engine.
  void copy(Stream* s, Direction dir, void* dst, const void* src, size_t n, std::vector<Use> uses, const char* what,
            std::shared_ptr<void> keep, bool inlined = false) {
    check_alive();
    const double duration = copy_duration(dir, n);
    {
      std::lock_guard<std::mutex> l(mu);
      copied[dir] += n;
      touch_all_locked(uses.data(), uses.size(), s, tick_locked(s), what);
      double no_engine = 0;
      if (is_virtual()) charge_locked(s, duration, inlined ? no_engine : copy_free[s->dev][dir], what, n);
    }
    if (is_virtual()) {
      s->drain();
      std::memcpy(dst, src, n);
      return;
    }
    for (auto& u : uses) u.block->queued++;
    s->push([=, this, uses = std::move(uses)] {
      (void)keep;
      double no_engine = 0;
      const double start = throttle(inlined ? no_engine : copy_free_wall[s->dev][dir], duration, n);
      std::memcpy(dst, src, n);  // at the end of its time, so that a reader who did not wait sees what was there before
      for (auto& u : uses) u.block->queued--;
      std::lock_guard<std::mutex> l(mu);
      span_locked(s, what, start, wall(), n);
    });
  }
  double throttle(double& engine_free, double duration, size_t n) {
    if (duration <= 0) return wall();
    double end;
    {
      std::lock_guard<std::mutex> l(mu);  // one engine a device and direction, as on a card
      end = engine_free = std::max(wall(), engine_free) + duration;
    }
    sleep_seconds(end - n / kMemcpyRate - wall());
    return end - duration;
  }
  // Before a kernel that runs on the caller's thread; returns its tick.
  uint64_t begin(Stream* s, const Use* uses, size_t n, const char* what) {
    check_alive();
    s->drain();
    std::lock_guard<std::mutex> l(mu);
    const uint64_t tick = tick_locked(s);
    touch_all_locked(uses, n, s, tick, what);
    return tick;
  }
  void end(Stream* s, double start, double bytes, double flop, const char* what) {
    std::lock_guard<std::mutex> l(mu);
    if (is_virtual())
      charge_locked(s, std::max(over(bytes, cfg.memory), over(flop, cfg.flops)), compute_free[s->dev], what, bytes);
    else span_locked(s, what, start, wall(), bytes);
  }
  // A stand-in for a long kernel; in threads mode too the host runs ahead of it.
  void spin(Stream* s, double seconds) {
    check_alive();
    {
      std::lock_guard<std::mutex> l(mu);
      tick_locked(s);
      if (is_virtual()) return charge_locked(s, seconds, compute_free[s->dev], "spin", 0);
    }
    s->push([=, this] {
      double end;
      {
        std::lock_guard<std::mutex> l(mu);
        end = std::max(wall(), compute_free_wall[s->dev]) + seconds;
        compute_free_wall[s->dev] = end;
      }
      sleep_seconds(end - wall());
      std::lock_guard<std::mutex> l(mu);
      span_locked(s, "spin", end - seconds, wall(), 0);
    });
  }
  void host_work(double seconds) {
    if (!is_virtual()) {
      NoGil g;
      return sleep_seconds(seconds);
    }
    std::lock_guard<std::mutex> l(mu);
    host_time += exact(seconds);
  }

  // ---- device memory -------------------------------------------------------------------------------------------------
  static void grow(size_t& current, size_t& peak, size_t n) {
    current += n;
    peak = std::max(peak, current);
  }
  static bool countdown(int64_t& left) { return left >= 0 && left-- == 0; }
  static char* fresh(size_t n) {
    auto* p = static_cast<char*>(std::aligned_alloc(64, (std::max<size_t>(n, 1) + 63) / 64 * 64));
    TORCH_CHECK(p, "sim: the host has no ", n, " bytes left");
    return p;
  }
  BlockP poison(BlockP b) const {  // without the lock: it may take long
    if (cfg.poison && b->own) std::memset(b->ptr, 0xFF, b->nbytes);
    return b;
  }
  void reap_locked() {  // gives back what no recorded stream uses any longer
    auto finished = [&](const MarkerP& m) { return is_virtual() ? m->virtual_time <= host_time : m->is_done(); };
    size_t kept = 0;
    for (auto& entry : deferred) {
      if (std::all_of(entry.second.begin(), entry.second.end(), finished)) memory[entry.first->dev].active -= entry.first->charged;
      else std::swap(deferred[kept++], entry);
    }
    deferred.resize(kept);
  }
  // `adopted`: memory that exists already, held by `keep`; else fresh memory.
  BlockP alloc(int dev, Stream* s, size_t n, void* adopted, std::shared_ptr<void> keep) {
    check_alive();
    const size_t charged = (n + kGranule - 1) / kGranule * kGranule;
    auto b = std::make_shared<Block>();
    std::unique_lock<std::mutex> l(mu);
    auto& mem = memory[dev];
    reap_locked();
    auto full = [&] { return cfg.capacity && mem.active + charged > cfg.capacity; };
    auto mine = [&] {
      return std::find_if(deferred.begin(), deferred.end(), [&](const auto& entry) { return entry.first->dev == dev; });
    };
    for (auto it = mine(); full() && it != deferred.end(); it = mine()) {  // under pressure, wait as CUDA's allocator does
      const auto markers = it->second;
      l.unlock();
      for (auto& m : markers) host_waits(m);
      l.lock();
      reap_locked();
    }
    const bool injected = countdown(cfg.fail_alloc_in);
    if (injected || full()) {
      mem.ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", dev, " out of memory. Tried to allocate ", n, " bytes. Capacity ",
                       cfg.capacity, " bytes (0: unlimited), of which ", mem.active, " are in use",
                       injected ? " (injected failure)." : ".");
    }
    if (cfg.races != Races::Off) check_reuse_locked(s);
    b->uid = next_uid++;
    b->dev = dev;
    b->home = s;
    b->nbytes = n;
    b->charged = charged;
    b->own = !adopted;
    b->keep = std::move(keep);
    b->ptr = adopted ? static_cast<char*>(adopted) : fresh(n);
    grow(mem.allocated, mem.allocated_peak, charged);
    grow(mem.active, mem.active_peak, charged);
    mem.total += charged;
    mem.count++;
    grow(mem.live, mem.live_peak, 1);
    mem.since_reset++;
    l.unlock();
    return poison(std::move(b));
  }
  void free_block(const BlockP& b) {  // the host lets go of it
    if (forked) return;
    std::unique_lock<std::mutex> l(mu);
    auto& mem = memory[b->dev];
    mem.allocated -= b->charged;
    mem.freed += b->charged;
    mem.live--;
    const auto recorded = b->recorded;
    if (cfg.races != Races::Off) bury_locked(*b);
    if (recorded.empty()) {
      mem.active -= b->charged;
      return;
    }
    l.unlock();
    std::vector<MarkerP> markers;
    for (auto* s : recorded) markers.push_back(record(s));
    l.lock();
    deferred.emplace_back(b, std::move(markers));
    reap_locked();
  }
  void bury_locked(const Block& b) {
    std::vector<Access> pending;
    for (const auto& a : b.past) {
      const bool ordered = a.actor == b.home->actor || a.tick <= component(b.home->clock, a.actor) || a.tick <= component(host, a.actor);
      const bool covered = std::any_of(b.recorded.begin(), b.recorded.end(), [&](const Stream* s) { return s->actor == a.actor; });
      if (!ordered && !covered) pending.push_back(a);
    }
    if (!pending.empty()) graves[b.home].push_back({b.dev, b.nbytes, std::move(pending)});
  }
  void record_stream(const BlockP& b, Stream* s) {
    std::lock_guard<std::mutex> l(mu);
    if (s != b->home && std::find(b->recorded.begin(), b->recorded.end(), s) == b->recorded.end()) b->recorded.push_back(s);
  }

  // ---- pinned memory -------------------------------------------------------------------------------------------------
  BlockP find_pin_locked(const void* p) {
    const auto* at = static_cast<const char*>(p);
    auto it = pins.upper_bound(at);
    if (it == pins.begin()) return nullptr;
    --it;
    return at < it->second->ptr + std::max<size_t>(it->second->nbytes, 1) ? it->second : nullptr;
  }
  BlockP find_pin(const void* p) {
    std::lock_guard<std::mutex> l(mu);
    return find_pin_locked(p);
  }
  BlockP pin_locked(char* p, size_t n) {  // p null: fresh memory
    check_alive();
    TORCH_CHECK(!countdown(cfg.fail_pin_in), "sim: pinned host memory could not be had for ", n, " bytes (injected failure)");
    TORCH_CHECK(!cfg.pinned_capacity || pinned.allocated + n <= cfg.pinned_capacity, "sim: pinned host memory exhausted: ", n,
                " bytes requested, ", pinned.allocated, " of ", cfg.pinned_capacity, " in use");
    auto b = std::make_shared<Block>();
    b->uid = next_uid++;
    b->nbytes = b->charged = n;
    b->own = !p;
    b->ptr = p ? p : fresh(n);
    grow(pinned.allocated, pinned.allocated_peak, n);
    pinned.count++;
    pinned.live++;
    pinned.since_reset++;
    return pins[b->ptr] = b;
  }
  void unpin_locked(const BlockP& b) {
    pinned.allocated -= b->charged;
    pinned.live--;
    pins.erase(b->ptr);
  }
  BlockP alloc_pinned(size_t n) {
    std::unique_lock<std::mutex> l(mu);
    auto b = pin_locked(nullptr, n);
    l.unlock();
    return poison(std::move(b));
  }
  void free_pinned(const BlockP& b) {
    if (forked) return;
    std::lock_guard<std::mutex> l(mu);
    unpin_locked(b);
  }
  void host_register(char* p, size_t n) {  // as cudaHostRegister
    std::lock_guard<std::mutex> l(mu);
    TORCH_CHECK(p && n, "sim: host_register needs an address and at least one byte");
    const auto next = pins.lower_bound(p);
    TORCH_CHECK(!find_pin_locked(p) && (next == pins.end() || next->first >= p + n),
                "sim: the range is registered or pinned already, at least in part");
    pin_locked(p, n);
  }
  void host_unregister(char* p) {
    BlockP b;
    {
      std::lock_guard<std::mutex> l(mu);
      auto it = pins.find(p);
      TORCH_CHECK(it != pins.end() && !it->second->own, "sim: host_unregister: no range that starts here is registered");
      b = it->second;
      unpin_locked(b);
    }
    {
      NoGil g;  // a card would fault: wait, and report below
      while (b->queued.load() > 0) std::this_thread::yield();
    }
    std::lock_guard<std::mutex> l(mu);
    if (cfg.races != Races::Off) check_unregister_locked(*b);
  }
  void check_unregister_locked(const Block& b) {
    for (const auto& a : b.past) {
      if (a.tick <= component(host, a.actor)) continue;
      Race r{"unregister-in-use", a.what, name_of(a.actor), "host_unregister", "host", {}, b.nbytes, a.lo, a.hi, b.dev};
      r.message = r.kind + ": " + memory_name(b.dev, b.nbytes) + " were unregistered while '" + r.first + "' on " + r.first_on +
                  " may still use them (the host did not wait)";
      return report_locked(std::move(r));
    }
  }
};

}  // namespace sim
