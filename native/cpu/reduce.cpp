// Reductions over any axes, softmax and argmax along one. Sums of floats are taken in double, in the order of the
// elements.
#include <cmath>

#include "cpu/check.h"
#include "cpu/lanes.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

struct Row;

// Offsets of the elements that are folded together, and of the first one of every output.
struct Folding {
  Shape kept, kept_strides, folded, folded_strides;
  int64_t num_out = 1, count = 1;
  bool contiguous = false;  // one output's elements lie side by side

  static int64_t offset(const Shape& dims, const Shape& strides, int64_t index) {
    int64_t at = 0;
    for (size_t i = dims.size(); i-- > 0; index /= dims[i]) at += index % dims[i] * strides[i];
    return at;
  }
};

Folding folding_of(const Tensor& x, const std::vector<bool>& folds) {
  Folding folding;
  int64_t stride = 1, expected = 1;
  folding.contiguous = true;
  for (size_t i = x.shape.size(); i-- > 0; stride *= x.shape[i]) {
    if (folds[i]) {
      folding.folded.insert(folding.folded.begin(), x.shape[i]);
      folding.folded_strides.insert(folding.folded_strides.begin(), stride);
      folding.count *= x.shape[i];
      folding.contiguous = folding.contiguous && (stride == expected || x.shape[i] == 1);
      expected *= x.shape[i];
    } else {
      folding.kept.insert(folding.kept.begin(), x.shape[i]);
      folding.kept_strides.insert(folding.kept_strides.begin(), stride);
      folding.num_out *= x.shape[i];
    }
  }
  return folding;
}

template <class C>
void gather_row(const Tensor& x, const Folding& folding, int64_t index, C* row) {
  int64_t base = Folding::offset(folding.kept, folding.kept_strides, index);
  if (folding.contiguous) return read_block(x.data, x.dtype, base, folding.count, row);
  int64_t inner = folding.folded.back(), step = folding.folded_strides.back();
  for (int64_t i = 0; i < folding.count; ++i) {
    int64_t outer = i % inner ? 0 : Folding::offset(folding.folded, folding.folded_strides, i);
    if (i % inner == 0) base = Folding::offset(folding.kept, folding.kept_strides, index) + outer;
    read_block(x.data, x.dtype, base + i % inner * step, 1, row + i);
  }
}

template <class C>
using Fold = C (*)(const C*, int64_t);

template <class C>
Step fold_step(const Tensor& x, const Tensor& y, const Folding& folding, Fold<C> fold) {
  return [=](Context& context) {
    int64_t grain = 1 + 8192 / (1 + folding.count);
    context.pool.parallel_for(folding.num_out, grain, [&](int64_t begin, int64_t end, int) {
      C* row = scratch<C, Row>(folding.count + 1);
      for (int64_t i = begin; i < end; ++i) {
        gather_row(x, folding, i, row);
        C result = fold(row, folding.count);
        write_block(y.data, y.dtype, i, 1, &result);
      }
    });
  };
}

// Sums in double for floats, in the type itself for integers.
template <class C, class F>
auto total(const C* row, int64_t n, F f) {
  if constexpr (std::is_same_v<C, float>) {
    return sum_of(row, n, f);
  } else {
    using S = std::conditional_t<std::is_integral_v<C>, uint64_t, double>;
    S sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += f(static_cast<S>(row[i]));
    return sum;
  }
}

constexpr auto kSame = [](auto x) { return x; };
constexpr auto kSquare = [](auto x) { return x * x; };

struct Sum {
  template <class C>
  static C of(const C* row, int64_t n) {
    return static_cast<C>(total(row, n, kSame));
  }
};
struct Mean {
  template <class C>
  static C of(const C* row, int64_t n) {
    if constexpr (std::is_integral_v<C>) return n ? static_cast<C>(total(row, n, kSame)) / n : 0;
    return static_cast<C>(total(row, n, kSame) / n);
  }
};
struct SumSquare {
  template <class C>
  static C of(const C* row, int64_t n) {
    return static_cast<C>(total(row, n, kSquare));
  }
};
struct L2 {
  template <class C>
  static C of(const C* row, int64_t n) {
    return static_cast<C>(std::sqrt(static_cast<double>(total(row, n, kSquare))));
  }
};
template <bool kLargest>
struct Extreme {
  template <class C>
  static C of(const C* row, int64_t n) {
    C best = kLargest ? std::numeric_limits<C>::lowest() : std::numeric_limits<C>::max();
    if constexpr (std::is_floating_point_v<C>) best = kLargest ? -INFINITY : INFINITY;
    for (int64_t i = 0; i < n; ++i) {
      if ((kLargest ? row[i] > best : row[i] < best) || row[i] != row[i])
        best = row[i];  // a NaN stays: nothing beats it
    }
    return best;
  }
};

Shape axes_of(const Args& args) {
  Tensor axes = optional_input(args, 1);
  if (!axes) return args.integers("axes");
  if (axes.dtype != DType::i32) want_dtype(axes, DType::i64, "axes");
  return integers_in(axes);
}

template <class Op>
Step make_reduce(const Args& args) {
  Tensor x = input(args, 0, "data"), y = output(args);
  want_dtype(y, x.dtype, "reduced");
  Shape axes = axes_of(args), wanted;
  bool none = axes.empty() && args.integer("noop_with_empty_axes", 0);
  std::vector<bool> folds(x.shape.size(), axes.empty() && !none);
  for (int64_t axis : axes) folds[want_axis(axis, x.shape.size())] = true;
  for (size_t i = 0; i < folds.size(); ++i) {
    if (!folds[i]) wanted.push_back(x.shape[i]);
    if (folds[i] && args.integer("keepdims", 1)) wanted.push_back(1);
  }
  want_shape(y, wanted, "reduced");
  Folding folding = folding_of(x, folds);
  if (is_float(x.dtype)) return fold_step<float>(x, y, folding, Op::template of<float>);
  if (x.dtype == DType::f64) return fold_step<double>(x, y, folding, Op::template of<double>);
  if (x.dtype == DType::u64 || x.dtype == DType::boolean) refuse(std::string(name_of(x.dtype)) + " has no kernel");
  return fold_step<int64_t>(x, y, folding, Op::template of<int64_t>);
}

void softmax_row(float* row, int64_t n, bool logarithm) {
  float top = -INFINITY;
  for (int64_t i = 0; i < n; ++i) top = row[i] > top || row[i] != row[i] ? row[i] : top;
  if (!logarithm) {
    map_lanes(row, row, n, [top](v16 x) { return exponential(x - top); });
    float sum = static_cast<float>(sum_of(row, n, kSame));
    for (int64_t i = 0; i < n; ++i) row[i] /= sum;
    return;
  }
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(static_cast<double>(row[i]) - top);
  float shift = static_cast<float>(std::log(sum));
  for (int64_t i = 0; i < n; ++i) row[i] = (row[i] - top) - shift;
}

Step make_softmax(const Args& args, bool logarithm) {
  Tensor x = input(args, 0, "input"), y = output(args);
  want_float(x, "input");
  want_shape(y, x.shape, "output");
  want_dtype(y, x.dtype, "output");
  int64_t axis = want_axis(args.integer("axis", -1), x.shape.size());
  int64_t n = x.shape[axis], inner = product(x.shape, axis + 1, x.shape.size()), outer = product(x.shape, 0, axis);
  return [=](Context& context) {
    context.pool.parallel_for(outer * inner, 1 + 4096 / (1 + n), [&](int64_t begin, int64_t end, int) {
      float* row = scratch<float, Row>(n + 1);
      for (int64_t i = begin; i < end; ++i) {
        int64_t start = i / inner * n * inner + i % inner;
        if (inner == 1) read_block(x.data, x.dtype, start, n, row);
        for (int64_t j = 0; inner != 1 && j < n; ++j) read_block(x.data, x.dtype, start + j * inner, 1, row + j);
        softmax_row(row, n, logarithm);
        if (inner == 1) write_block(y.data, y.dtype, start, n, row);
        for (int64_t j = 0; inner != 1 && j < n; ++j) write_block(y.data, y.dtype, start + j * inner, 1, row + j);
      }
    });
  };
}

Step make_plain_softmax(const Args& args) { return make_softmax(args, false); }
Step make_log_softmax(const Args& args) { return make_softmax(args, true); }

// The first (or last) position of the extreme; a NaN counts as one, as in numpy.
template <class C, bool kLargest>
int64_t extreme_at(const C* row, int64_t n, bool last) {
  int64_t best = 0;
  for (int64_t i = 1; i < n && row[best] == row[best]; ++i) {
    bool better = kLargest ? row[i] > row[best] : row[i] < row[best];
    if (better || row[i] != row[i] || (last && row[i] == row[best])) best = i;
  }
  return best;
}

template <class C, bool kLargest>
Step arg_step(const Tensor& x, const Tensor& y, const Folding& folding, bool last) {
  return [=](Context& context) {
    context.pool.parallel_for(folding.num_out, 1 + 8192 / (1 + folding.count), [&](int64_t begin, int64_t end, int) {
      C* row = scratch<C, Row>(folding.count + 1);
      for (int64_t i = begin; i < end; ++i) {
        gather_row(x, folding, i, row);
        static_cast<int64_t*>(y.data)[i] = extreme_at<C, kLargest>(row, folding.count, last);
      }
    });
  };
}

template <bool kLargest>
Step make_arg(const Args& args) {
  Tensor x = input(args, 0, "data"), y = output(args);
  want_dtype(y, DType::i64, "reduced");
  int64_t axis = want_axis(args.integer("axis", 0), x.shape.size());
  if (x.shape[axis] == 0) refuse("data is " + describe(x) + ": no position in an empty axis");
  std::vector<bool> folds(x.shape.size(), false);
  folds[axis] = true;
  Shape wanted = x.shape;
  wanted[axis] = 1;
  if (!args.integer("keepdims", 1)) wanted.erase(wanted.begin() + axis);
  want_shape(y, wanted, "reduced");
  bool last = args.integer("select_last_index", 0) != 0;
  Folding folding = folding_of(x, folds);
  if (is_float(x.dtype)) return arg_step<float, kLargest>(x, y, folding, last);
  if (x.dtype == DType::f64) return arg_step<double, kLargest>(x, y, folding, last);
  if (x.dtype == DType::u64) refuse("uint64 has no kernel");
  return arg_step<int64_t, kLargest>(x, y, folding, last);
}

}  // namespace

GENAI_KERNEL("ReduceSum", make_reduce<Sum>);
GENAI_KERNEL("ReduceMean", make_reduce<Mean>);
GENAI_KERNEL("ReduceSumSquare", make_reduce<SumSquare>);
GENAI_KERNEL("ReduceL2", make_reduce<L2>);
GENAI_KERNEL("ReduceMax", make_reduce<Extreme<true>>);
GENAI_KERNEL("ReduceMin", make_reduce<Extreme<false>>);
GENAI_KERNEL("Softmax", make_plain_softmax);
GENAI_KERNEL("LogSoftmax", make_log_softmax);
GENAI_KERNEL("ArgMax", make_arg<true>);
GENAI_KERNEL("ArgMin", make_arg<false>);

}  // namespace genai::GENAI_ISA
