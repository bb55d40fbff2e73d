// A recorded step: kernel calls bound to their buffers, run in order by one call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel.h"
#include "threads.h"

namespace genai {

struct StepTime {
  std::string name;
  uint64_t calls = 0;
  uint64_t ns = 0;
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
  const std::vector<StepTime>& times() const { return times_; }

 private:
  std::string isa_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<State> state_;
  std::vector<Step> steps_;
  std::vector<StepTime> times_;
  bool profiling_ = false;
};

}  // namespace genai
