// A recorded step: kernel calls bound to their buffers, run in order by one call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel.h"
#include "threads.h"

namespace genai {

// One run of one step while profiling: nanoseconds of the steady clock.
struct Span {
  uint64_t step = 0;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
};

class Program {
 public:
  Program(std::string isa, std::shared_ptr<ThreadPool> pool, std::shared_ptr<State> state);

  // Checks the arguments, binds them, and returns the step's index. Throws std::invalid_argument, the kernel's name
  // first.
  size_t add(const std::string& kernel, Args args);
  void run(size_t first, size_t last);  // steps [first, last)
  size_t size() const { return steps_.size(); }

  void set_profiling(bool on) { profiling_ = on; }
  std::vector<Span> take_spans();  // those since the last call, oldest first

 private:
  std::string isa_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<State> state_;
  std::vector<Step> steps_;
  std::vector<Span> spans_;
  bool profiling_ = false;

  void run_timed(Context& context, size_t first, size_t last);
};

}  // namespace genai
