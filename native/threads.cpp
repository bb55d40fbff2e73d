#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace genai {
namespace {

using Body = std::function<void(int64_t, int64_t, int)>;

std::atomic<int> fork_count{0};
thread_local bool inside_job = false;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins while `value` is `old`, first hot, then giving the core away, then asleep. Decode steps follow each other
// within tens of microseconds, so hot spinning pays; on a loaded machine it must end soon.
void wait_while_equal(std::atomic<uint32_t>& value, uint32_t old) {
  constexpr int kHot = 2000, kYield = 20;
  for (int i = 0; i < kHot; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  for (int i = 0; i < kYield; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    sched_yield();
  }
  value.wait(old, std::memory_order_acquire);
}

struct Range {
  int64_t begin, end;
};

// Range `part` of `parts`, borders at multiples of grain.
Range split(int64_t count, int64_t grain, int64_t part, int64_t parts) {
  int64_t units = (count + grain - 1) / grain;
  return {std::min(count, units * part / parts * grain), std::min(count, units * (part + 1) / parts * grain)};
}

}  // namespace

// A job is cut into parts with fixed borders; part i is meant for thread i, but whoever is free first claims it. So a
// worker that the system does not schedule delays nothing it has not begun.
struct ThreadPool::Impl {
  struct alignas(64) Claim {
    std::atomic<uint64_t> job{0};  // the last job in which somebody took this part
  };

  int size = 1;
  int forks = 0;  // fork_count when the workers were started: a forked child has none of them
  std::vector<std::thread> workers;
  std::vector<Claim> claims;
  std::mutex busy;  // one job at a time, also when several Python threads share the pool
  uint64_t last_job = 0;

  alignas(64) std::atomic<uint32_t> epoch{0};    // changes with every job: what idle workers watch
  alignas(64) std::atomic<uint64_t> current{0};  // job number << 16 | its parts
  alignas(64) std::atomic<uint32_t> pending{0};  // parts not done
  // Written before `current`, and only while no part is claimed: whoever has claimed one may read them.
  alignas(64) const Body* body = nullptr;
  int64_t count = 0, grain = 1;
  std::vector<std::exception_ptr> errors;
  std::atomic<bool> stopping{false};

  void work(int64_t part, int64_t parts) {
    Range range = split(count, grain, part, parts);
    inside_job = true;
    try {
      if (range.begin < range.end) (*body)(range.begin, range.end, static_cast<int>(part));
    } catch (...) {
      errors[part] = std::current_exception();
    }
    inside_job = false;
    if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) pending.notify_one();
  }

  // Takes parts of the current job, the thread's own first, until none is left.
  void take_parts(int thread) {
    uint64_t now = current.load(std::memory_order_acquire), job = now >> 16;
    int64_t parts = static_cast<int64_t>(now & 0xffff);
    for (int64_t i = 0; i < parts; ++i) {
      int64_t part = (thread + i) % parts;
      uint64_t seen = claims[part].job.load(std::memory_order_relaxed);
      // A job ends only after each of its parts was claimed, so a claim that succeeds is one of a job that still runs.
      if (seen < job && claims[part].job.compare_exchange_strong(seen, job, std::memory_order_acq_rel))
        work(part, parts);
    }
  }

  void loop(int thread) {
    uint32_t seen = 0;
    while (true) {
      wait_while_equal(epoch, seen);
      seen = epoch.load(std::memory_order_acquire);
      if (stopping.load(std::memory_order_relaxed)) return;
      take_parts(thread);
    }
  }

  void wake() {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
  }

  void run(const Body& job, int64_t job_count, int64_t job_grain, int64_t parts) {
    body = &job;
    count = job_count;
    grain = job_grain;
    pending.store(static_cast<uint32_t>(parts), std::memory_order_relaxed);
    current.store(++last_job << 16 | static_cast<uint64_t>(parts), std::memory_order_release);
    wake();
    take_parts(0);
    finish();
  }

  void finish() {
    uint32_t left;
    while ((left = pending.load(std::memory_order_acquire)) != 0) wait_while_equal(pending, left);
    std::exception_ptr first;
    for (auto& error : errors) {
      if (error && !first) first = error;
      error = nullptr;
    }
    if (first) std::rethrow_exception(first);
  }

  void start(int num_threads) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); }); });
    size = std::clamp(num_threads, 1, 1024);
    claims = std::vector<Claim>(size);
    forks = fork_count.load();
    errors.resize(size);
    for (int thread = 1; thread < size; ++thread) workers.emplace_back([this, thread] { loop(thread); });
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(new Impl) { impl_->start(num_threads); }

ThreadPool::~ThreadPool() {
  // In a forked child the workers do not exist and cannot be joined; the memory goes with the process.
  if (impl_->forks != fork_count.load()) return;
  impl_->stopping.store(true);
  impl_->wake();
  for (auto& worker : impl_->workers) worker.join();
  delete impl_;
}

int ThreadPool::size() const { return impl_->size; }

void ThreadPool::parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  int64_t parts = std::min<int64_t>(impl_->size, (count + grain - 1) / grain);
  if (parts <= 1 || inside_job || impl_->forks != fork_count.load(std::memory_order_relaxed)) {
    body(0, count, 0);
    return;
  }
  std::lock_guard lock(impl_->busy);
  impl_->run(body, count, grain, parts);
}

}  // namespace genai
