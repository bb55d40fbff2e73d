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

// Spins while `value` is `old`, first hot, then giving the core away, then asleep. Decode steps follow each other within
// tens of microseconds, so hot spinning pays; on a loaded machine it must end soon.
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

struct ThreadPool::Impl {
  int size = 1;
  int forks = 0;  // fork_count when the workers were started: a forked child has none of them
  std::vector<std::thread> workers;
  std::mutex busy;  // one job at a time, also when several Python threads share the pool

  alignas(64) std::atomic<uint32_t> epoch{0};    // counts jobs
  alignas(64) std::atomic<uint32_t> pending{0};  // workers not done with the current job
  alignas(64) const Body* body = nullptr;        // nullptr: stop
  int64_t count = 0, grain = 1, parts = 1;
  std::vector<std::exception_ptr> errors;

  void work(int thread) {
    Range range = split(count, grain, thread, parts);
    if (thread >= parts || range.begin >= range.end) return;
    inside_job = true;
    try {
      (*body)(range.begin, range.end, thread);
    } catch (...) {
      errors[thread] = std::current_exception();
    }
    inside_job = false;
  }

  void loop(int thread) {
    uint32_t seen = 0;
    while (true) {
      wait_while_equal(epoch, seen);
      ++seen;
      if (!body) return;
      work(thread);
      if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) pending.notify_one();
    }
  }

  void announce(const Body* job) {
    body = job;
    pending.store(static_cast<uint32_t>(workers.size()), std::memory_order_relaxed);
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
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
    size = std::max(1, num_threads);
    forks = fork_count.load();
    errors.resize(size);
    for (int thread = 1; thread < size; ++thread) workers.emplace_back([this, thread] { loop(thread); });
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(new Impl) { impl_->start(num_threads); }

ThreadPool::~ThreadPool() {
  // In a forked child the workers do not exist and cannot be joined; the memory goes with the process.
  if (impl_->forks != fork_count.load()) return;
  impl_->announce(nullptr);
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
  impl_->count = count;
  impl_->grain = grain;
  impl_->parts = parts;
  impl_->announce(&body);
  impl_->work(0);
  impl_->finish();
}

}  // namespace genai
