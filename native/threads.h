// A persistent pool. Work is split by outputs, never by the summed dimension: results do not depend on the thread
// count.
#pragma once

#include <cstdint>
#include <functional>

namespace genai {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls body(begin, end, thread) over a partition of [0, count) into at most size() ranges whose borders are
  // multiples of `grain`; the caller works too; returns when all are done. Workers spin for a while between calls, then
  // sleep.
  void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t, int)>& body);

 private:
  struct Impl;
  Impl* impl_;
};

}  // namespace genai
