#include "program.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "isa.h"

namespace genai {

Program::Program(std::string isa, std::shared_ptr<ThreadPool> pool, std::shared_ptr<State> state)
    : isa_(std::move(isa)), pool_(std::move(pool)), state_(std::move(state)) {
  auto isas = supported_isas();
  if (std::find(isas.begin(), isas.end(), isa_) == isas.end()) {
    throw std::invalid_argument("instruction set `" + isa_ + "` is not supported here");
  }
}

size_t Program::add(const std::string& kernel, Args args) {
  Factory factory = find_kernel(isa_, kernel);
  if (!factory) throw std::invalid_argument(kernel + ": no such kernel for `" + isa_ + "`");
  try {
    steps_.push_back(factory(args));
  } catch (const std::exception& error) {
    throw std::invalid_argument(kernel + ": " + error.what());
  }
  return steps_.size() - 1;
}

void Program::run(size_t first, size_t last) {
  if (last > steps_.size() || first > last) throw std::out_of_range("no such step");
  Context context{*pool_, *state_};
  if (profiling_) return run_timed(context, first, last);
  for (size_t i = first; i < last; ++i) steps_[i](context);
}

void Program::run_timed(Context& context, size_t first, size_t last) {
  auto now = [] {
    return uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  };
  uint64_t start = now();
  for (size_t i = first; i < last; ++i) {
    steps_[i](context);
    uint64_t end = now();  // also the start of the next: one clock read a step
    spans_.push_back({i, start, end});
    start = end;
  }
}

std::vector<Span> Program::take_spans() { return std::exchange(spans_, {}); }

}  // namespace genai
