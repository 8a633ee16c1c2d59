// What orders work: vector clocks, event markers, memory blocks with their past accesses, and streams.
#pragma once
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sim {

// A vector clock; the index is the actor: 0 is the host, 1 and up are streams.
using Clock = std::vector<uint64_t>;

inline void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}
inline uint64_t component(const Clock& clock, int actor) {
  return static_cast<size_t>(actor) < clock.size() ? clock[actor] : 0;
}

// Waiting must never hold the GIL: a stream's thread may need it to drop a tensor that Python owns.
struct NoGil {
  PyThreadState* state = nullptr;
  NoGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~NoGil() {
    if (state) PyEval_RestoreThread(state);
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;
};

inline double wall() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void sleep_seconds(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// One recording of an event. `clock` and `virtual_time` are fixed when it is recorded.
struct Marker {
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  double wall_time = 0, virtual_time = 0;
  Clock clock;

  void fire() {
    {
      std::lock_guard<std::mutex> l(m);
      done = true;
      wall_time = wall();
    }
    cv.notify_all();
  }
  bool is_done() {
    std::lock_guard<std::mutex> l(m);
    return done;
  }
  void wait() {
    std::unique_lock<std::mutex> l(m);
    cv.wait(l, [&] { return done; });
  }
};
using MarkerP = std::shared_ptr<Marker>;

// `actor` touched the bytes [lo, hi) of a block at its own time `tick`.
struct Access {
  size_t lo, hi;
  int actor;
  uint64_t tick;
  bool write;
  const char* what;
};

struct Stream;

struct Block {
  uint64_t uid = 0;
  int dev = -1;                // -1: pinned host memory
  Stream* home = nullptr;      // the stream it was allocated on
  char* ptr = nullptr;
  size_t nbytes = 0, charged = 0;
  bool own = true;             // false: the memory belongs to `keep`, or (registered host memory) to someone else
  std::shared_ptr<void> keep;  // a CPU storage that a kernel made and the device took over
  std::vector<Access> past;
  std::vector<Stream*> recorded;  // by record_stream
  std::atomic<int> queued{0};     // copies that still have to touch it

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (own && ptr) std::free(ptr);
  }
};
using BlockP = std::shared_ptr<Block>;

// Bytes of a block that an operation touches.
struct Use {
  BlockP block;
  size_t lo, hi;
  bool write;
};

// An in-order queue with a thread of its own, which starts with the first queued task and never ends.
struct Stream {
  int dev;
  int64_t id;
  int actor;
  Clock clock;              // guarded by Runtime::mu
  double virtual_time = 0;  // as `clock`
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::function<void()>> tasks;
  std::atomic<uint64_t> in{0}, out{0};
  bool started = false;

  Stream(int dev, int64_t id, int actor) : dev(dev), id(id), actor(actor) {}

  void push(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> l(m);
      tasks.push_back(std::move(task));
      in++;
      if (!started) {
        started = true;
        std::thread([this] { loop(); }).detach();
      }
    }
    cv.notify_all();
  }
  void loop() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> l(m);
        cv.wait(l, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
      task = nullptr;
      {
        std::lock_guard<std::mutex> l(m);
        out++;
      }
      cv.notify_all();
    }
  }
  bool idle() const { return out.load() == in.load(); }
  void drain() {
    if (idle()) return;
    NoGil g;
    const uint64_t upto = in.load();
    std::unique_lock<std::mutex> l(m);
    cv.wait(l, [&] { return out.load() >= upto; });
  }
};

}  // namespace sim
