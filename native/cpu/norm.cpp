// Normalisation over the last dimensions of each row: statistics in double, one rounding to the output's dtype.
#include <cmath>

#include "cpu/check.h"
#include "cpu/lanes.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

struct Norm {
  bool center = false;  // subtract the mean (LayerNormalization), or not (RMS)
  double epsilon = 1e-5;
  int64_t width = 0;
  int64_t skip_rows = 0;             // rows of `skip` before it repeats
  Tensor x, skip, add, gamma, beta;  // x + skip + add is normalised; all but x and gamma may be missing
  Tensor y, mean, inv_std, sum;      // all but y may be missing
};

struct Scratch;

void add_row(const Tensor& tensor, int64_t offset, int64_t n, float* buffer, float* row) {
  const float* values = block_of(tensor, offset, n, buffer);
  for (int64_t i = 0; i < n; ++i) row[i] += values[i];
}

// The row to normalise, rounded where a separate Add would round it.
void load_row(const Norm& norm, int64_t row, float* values, float* buffer) {
  int64_t n = norm.width;
  read_block(norm.x.data, norm.x.dtype, row * n, n, values);
  if (norm.skip) add_row(norm.skip, row % norm.skip_rows * n, n, buffer, values);
  if (norm.add) add_row(norm.add, 0, n, buffer, values);
  if (norm.skip && norm.x.dtype != DType::f32) {
    write_block(buffer, norm.x.dtype, 0, n, values);
    read_block(buffer, norm.x.dtype, 0, n, values);
  }
  if (norm.sum) write_block(norm.sum.data, norm.sum.dtype, row * n, n, values);
}

void normalize_row(const Norm& norm, int64_t row, const float* gamma, const float* beta, float* values, float* buffer) {
  int64_t n = norm.width;
  load_row(norm, row, values, buffer);
  double mean = norm.center ? sum_of(values, n, [](d8 x) { return x; }) / n : 0.0;
  double squares = sum_of(values, n, [mean](d8 x) { return (x - mean) * (x - mean); });
  float inverse = static_cast<float>(1.0 / std::sqrt(squares / n + norm.epsilon)), shift = static_cast<float>(mean);
  for (int64_t i = 0; i < n; ++i) values[i] = (values[i] - shift) * inverse * gamma[i];
  if (beta) {
    for (int64_t i = 0; i < n; ++i) values[i] += beta[i];
  }
  write_block(norm.y.data, norm.y.dtype, row * n, n, values);
  if (norm.mean) write_block(norm.mean.data, norm.mean.dtype, row, 1, &shift);
  if (norm.inv_std) write_block(norm.inv_std.data, norm.inv_std.dtype, row, 1, &inverse);
}

Step norm_step(const Norm& norm) {
  int64_t rows = norm.width ? norm.x.size() / norm.width : 0;
  return [=](Context& context) {
    int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, norm.width));
    context.pool.parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
      int64_t n = (norm.width + kLanes) / kLanes * kLanes;
      float* memory = scratch<float, Scratch>(4 * n);
      const float* gamma = block_of(norm.gamma, 0, norm.width, memory);
      const float* beta = norm.beta ? block_of(norm.beta, 0, norm.width, memory + n) : nullptr;
      for (int64_t row = begin; row < end; ++row) normalize_row(norm, row, gamma, beta, memory + 2 * n, memory + 3 * n);
    });
  };
}

// Checks what all share. `axis` is where the normalised dimensions begin.
void check_norm(Norm& norm, int64_t axis) {
  want_float(norm.x, "X");
  norm.width = product(norm.x.shape, axis, norm.x.shape.size());
  for (const Tensor* vector : {&norm.gamma, &norm.beta, &norm.add}) {
    if (!*vector) continue;
    if (vector->size() != norm.width) {
      refuse("a scale or bias is " + describe(*vector) + ", wanted " + std::to_string(norm.width) + " elements");
    }
    want_float(*vector, "scale or bias");
  }
  want_shape(norm.y, norm.x.shape, "Y");
  want_float(norm.y, "Y");
  int64_t rows = norm.width ? norm.x.size() / norm.width : 0;
  for (const Tensor* column : {&norm.mean, &norm.inv_std}) {
    if (*column && column->size() != rows)
      refuse("a statistic is " + describe(*column) + ", wanted " + std::to_string(rows));
    if (*column) want_float(*column, "mean or inv_std");
  }
}

Step make_layer_norm(const Args& args, bool center) {
  Norm norm;
  norm.center = center;
  norm.epsilon = args.real("epsilon", 1e-5);
  norm.x = input(args, 0, "X");
  norm.gamma = input(args, 1, "scale");
  norm.beta = optional_input(args, 2);
  norm.y = output(args);
  norm.mean = center ? optional_output(args, 1) : Tensor{};
  norm.inv_std = optional_output(args, center ? 2 : 1);
  check_norm(norm, want_axis(args.integer("axis", -1), norm.x.shape.size()));
  return norm_step(norm);
}

Step make_skip_norm(const Args& args, bool center) {
  Norm norm;
  norm.center = center;
  norm.epsilon = args.real("epsilon", 1e-12);
  norm.x = input(args, 0, "input");
  norm.skip = input(args, 1, "skip");
  norm.gamma = input(args, 2, "gamma");
  norm.beta = center ? optional_input(args, 3) : Tensor{};
  norm.add = optional_input(args, center ? 4 : 3);
  norm.y = output(args);
  norm.mean = optional_output(args, 1);
  norm.inv_std = optional_output(args, 2);
  norm.sum = optional_output(args, 3);
  if (norm.x.shape.empty()) refuse("`input` is a scalar");
  check_norm(norm, norm.x.shape.size() - 1);
  want_dtype(norm.skip, norm.x.dtype, "skip");
  if (norm.skip.size() == 0 ? norm.x.size() != 0
                            : norm.x.size() % norm.skip.size() != 0 || norm.skip.size() % norm.width != 0) {
    refuse("`skip` is " + describe(norm.skip) + ", wanted " + describe(norm.x.shape) + " or a suffix of it");
  }
  norm.skip_rows = norm.width ? norm.skip.size() / norm.width : 1;
  if (norm.sum) {
    want_shape(norm.sum, norm.x.shape, "input_skip_bias_sum");
    want_dtype(norm.sum, norm.x.dtype, "input_skip_bias_sum");
  }
  return norm_step(norm);
}

Step make_rms(const Args& args) { return make_layer_norm(args, false); }
Step make_layer(const Args& args) { return make_layer_norm(args, true); }
Step make_skip_rms(const Args& args) { return make_skip_norm(args, false); }
Step make_skip_layer(const Args& args) { return make_skip_norm(args, true); }

// x / norm_p(x) along an axis; a zero vector stays zero.
Step make_lp(const Args& args) {
  Tensor x = input(args, 0, "input"), y = output(args);
  want_float(x, "input");
  want_shape(y, x.shape, "output");
  want_dtype(y, x.dtype, "output");
  int64_t p = args.integer("p", 2), axis = want_axis(args.integer("axis", -1), x.shape.size());
  if (p != 1 && p != 2) refuse("attribute `p` is " + std::to_string(p) + ", wanted 1 or 2");
  int64_t n = x.shape[axis], inner = product(x.shape, axis + 1, x.shape.size()), outer = product(x.shape, 0, axis);
  return [=](Context& context) {
    context.pool.parallel_for(outer * inner, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, n)),
                              [&](int64_t begin, int64_t end, int) {
                                float* values = scratch<float, Scratch>(n + 1);
                                for (int64_t row = begin; row < end; ++row) {
                                  int64_t start = row / inner * n * inner + row % inner;
                                  if (inner == 1) read_block(x.data, x.dtype, start, n, values);
                                  for (int64_t i = 0; inner != 1 && i < n; ++i)
                                    read_block(x.data, x.dtype, start + i * inner, 1, values + i);
                                  double sum = p == 1 ? sum_of(values, n, [](d8 v) { return select(v < 0.0, -v, v); })
                                                      : sum_of(values, n, [](d8 v) { return v * v; });
                                  float length = static_cast<float>(p == 1 ? sum : std::sqrt(sum));
                                  for (int64_t i = 0; i < n; ++i) values[i] = length == 0 ? 0.0f : values[i] / length;
                                  if (inner == 1) write_block(y.data, y.dtype, start, n, values);
                                  for (int64_t i = 0; inner != 1 && i < n; ++i)
                                    write_block(y.data, y.dtype, start + i * inner, 1, values + i);
                                }
                              });
  };
}

}  // namespace

GENAI_KERNEL("SimplifiedLayerNormalization", make_rms);
GENAI_KERNEL("RMSNormalization", make_rms);
GENAI_KERNEL("LayerNormalization", make_layer);
GENAI_KERNEL("SkipSimplifiedLayerNormalization", make_skip_rms);
GENAI_KERNEL("SkipLayerNormalization", make_skip_layer);
GENAI_KERNEL("LpNormalization", make_lp);

}  // namespace genai::GENAI_ISA
