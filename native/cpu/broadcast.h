// numpy broadcasting as a walk over runs of the output's innermost dimension.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/check.h"

namespace genai::GENAI_ISA {

template <size_t N>
struct Walk {
  Shape dims;                    // of the output, neighbours merged where every operand allows; at least one
  std::array<Shape, N> strides;  // in elements; the innermost is 0 or 1
  int64_t size = 1;
};

// How `operands` broadcast to `out`. Refuses shapes that do not.
template <size_t N>
Walk<N> make_walk(const Shape& out, const std::array<Shape, N>& operands) {
  Walk<N> walk;
  for (int64_t dim : out) walk.size *= dim;
  std::array<Shape, N> strides;
  for (size_t k = 0; k < N; ++k) {
    const Shape& shape = operands[k];
    if (shape.size() > out.size()) refuse(describe(shape) + " does not broadcast to " + describe(out));
    strides[k].assign(out.size(), 0);
    int64_t stride = 1;
    for (size_t back = 1; back <= shape.size(); ++back) {
      int64_t dim = shape[shape.size() - back], wanted = out[out.size() - back];
      if (dim != wanted && dim != 1) refuse(describe(shape) + " does not broadcast to " + describe(out));
      strides[k][out.size() - back] = dim == 1 ? 0 : stride;
      stride *= dim;
    }
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] == 1) continue;
    bool merge = !walk.dims.empty();
    for (size_t k = 0; merge && k < N; ++k) merge = walk.strides[k].back() == strides[k][i] * out[i];
    if (!merge) walk.dims.push_back(1);
    walk.dims.back() *= out[i];
    for (size_t k = 0; k < N; ++k) {
      if (!merge) walk.strides[k].push_back(0);
      walk.strides[k].back() = strides[k][i];
    }
  }
  if (walk.dims.empty()) {
    walk.dims.push_back(1);
    for (auto& stride : walk.strides) stride.push_back(0);
  }
  return walk;
}

// Calls run(out_offset, offsets, n) for the runs of elements [begin, end), none longer than `longest`.
template <size_t N, class Run>
void walk_runs(const Walk<N>& walk, int64_t begin, int64_t end, int64_t longest, Run&& run) {
  size_t last = walk.dims.size() - 1;
  while (begin < end) {
    int64_t rest = begin, inner = rest % walk.dims[last];
    std::array<int64_t, N> offsets{};
    for (size_t i = last + 1; i-- > 0; rest /= walk.dims[i]) {
      int64_t index = rest % walk.dims[i];
      for (size_t k = 0; k < N; ++k) offsets[k] += index * walk.strides[k][i];
    }
    int64_t n = std::min({walk.dims[last] - inner, end - begin, longest});
    run(begin, offsets, n);
    begin += n;
  }
}

}  // namespace genai::GENAI_ISA
