// Kernels that only move elements: bytes are copied, whatever they mean.
#include <algorithm>
#include <cstring>

#include "cpu/broadcast.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;

// Element (i0, i1, ...) of `dims` goes from `from + sum(i * from_strides)` to `to + sum(i * to_strides)`; strides in
// elements.
struct StridedCopy {
  Shape dims, from_strides, to_strides;
  int64_t from_offset = 0, to_offset = 0, element = 1;

  // Merges neighbouring dimensions that both sides walk evenly, and drops those of size 1.
  void simplify() {
    Shape kept, from, to;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i] == 1) continue;
      bool merge = !kept.empty() && from.back() == from_strides[i] * dims[i] && to.back() == to_strides[i] * dims[i];
      if (!merge) kept.push_back(1), from.push_back(0), to.push_back(0);
      kept.back() *= dims[i];
      from.back() = from_strides[i];
      to.back() = to_strides[i];
    }
    if (kept.empty()) kept = {1}, from = {1}, to = {1};
    dims = kept, from_strides = from, to_strides = to;
  }
};

template <class T>
void copy_run(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t n) {
  if (from_stride == 1 && to_stride == 1) {
    std::memcpy(to, from, n * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(to + i * to_stride * sizeof(T), from + i * from_stride * sizeof(T), sizeof(T));
}

using CopyRun = void (*)(const char*, int64_t, char*, int64_t, int64_t);

CopyRun run_for(int64_t element) {
  return element == 1   ? copy_run<uint8_t>
         : element == 2 ? copy_run<uint16_t>
         : element == 4 ? copy_run<uint32_t>
                        : copy_run<uint64_t>;
}

void copy_strided(ThreadPool& pool, const StridedCopy& plan, const void* source, void* target) {
  size_t last = plan.dims.size() - 1;
  int64_t inner = plan.dims[last], outer = product(plan.dims, 0, last);
  CopyRun run = run_for(plan.element);
  int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, inner * plan.element));
  if (inner == 0) return;
  pool.parallel_for(outer, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t from = plan.from_offset, to = plan.to_offset, rest = row;
      for (size_t i = last; i-- > 0; rest /= plan.dims[i]) {
        int64_t index = rest % plan.dims[i];
        from += index * plan.from_strides[i];
        to += index * plan.to_strides[i];
      }
      run(static_cast<const char*>(source) + from * plan.element, plan.from_strides[last],
          static_cast<char*>(target) + to * plan.element, plan.to_strides[last], inner);
    }
  });
}

Shape dense_strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

Step copy_step(StridedCopy plan, const Tensor& from, const Tensor& to) {
  plan.element = size_of(from.dtype);
  bool empty = std::find(plan.dims.begin(), plan.dims.end(), 0) != plan.dims.end();
  plan.simplify();
  return [=](Context& context) {
    if (!empty) copy_strided(context.pool, plan, from.data, to.data);
  };
}

// The input an operator reads while it is recorded: a constant, or computed before.
Shape read_integers(const Args& args, size_t index, const char* attribute) {
  Tensor tensor = optional_input(args, index);
  if (!tensor) return args.integers(attribute);
  if (tensor.dtype != DType::i32) want_dtype(tensor, DType::i64, attribute);
  return integers_in(tensor);
}

Step make_copy(const Args& args) {
  Tensor x = input(args, 0, "data"), y = output(args);
  want_dtype(y, x.dtype, "output");
  if (x.size() != y.size())
    refuse("data is " + describe(x) + " and the output " + describe(y) + ", wanted as many elements");
  return copy_step({{x.size()}, {1}, {1}}, x, y);
}

Step make_transpose(const Args& args) {
  Tensor x = input(args, 0, "data"), y = output(args);
  Shape perm = args.integers("perm"), strides = dense_strides(x.shape), wanted, from;
  if (perm.empty()) {
    for (size_t i = x.shape.size(); i-- > 0;) perm.push_back(i);
  }
  Shape sorted = perm;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != static_cast<int64_t>(i) || sorted.size() != x.shape.size())
      refuse("perm " + describe(perm) + " does not permute " + describe(x));
  }
  for (int64_t axis : perm) wanted.push_back(x.shape[axis]), from.push_back(strides[axis]);
  want_shape(y, wanted, "transposed");
  want_dtype(y, x.dtype, "transposed");
  return copy_step({wanted, from, dense_strides(wanted)}, x, y);
}

Step make_expand(const Args& args) {
  Tensor x = input(args, 0, "input"), y = output(args);
  want_dtype(y, x.dtype, "output");
  auto walk = make_walk<1>(y.shape, {x.shape});  // checks that it broadcasts
  StridedCopy plan{walk.dims, walk.strides[0], dense_strides(walk.dims)};
  return copy_step(plan, x, y);
}

Step make_tile(const Args& args) {
  Tensor x = input(args, 0, "input"), y = output(args);
  want_dtype(y, x.dtype, "output");
  if (x.shape.size() != y.shape.size())
    refuse("input is " + describe(x) + " and output " + describe(y) + ", wanted one rank");
  Shape strides = dense_strides(x.shape);
  StridedCopy plan;
  for (size_t i = 0; i < x.shape.size(); ++i) {
    if (x.shape[i] ? y.shape[i] % x.shape[i] : y.shape[i])
      refuse("output " + describe(y) + " does not repeat " + describe(x));
    plan.dims.push_back(x.shape[i] ? y.shape[i] / x.shape[i] : 0);
    plan.dims.push_back(x.shape[i]);
    plan.from_strides.push_back(0);
    plan.from_strides.push_back(strides[i]);
  }
  plan.to_strides = dense_strides(plan.dims);
  return copy_step(plan, x, y);
}

struct Cut {
  int64_t start, step, count;
};

// ONNX's rules for start:end:step over `dim` elements: numpy's, but going backwards begins at an element at the
// earliest.
Cut cut_of(int64_t start, int64_t end, int64_t step, int64_t dim) {
  if (step == 0) refuse("a step of Slice is 0");
  if (dim == 0) return {0, step, 0};
  auto place = [&](int64_t index, int64_t low, int64_t high) {
    return std::clamp(index < 0 ? std::max(index, -dim - 1) + dim : index, low, high);
  };
  int64_t distance = 0;
  if (step > 0) {
    start = place(start, 0, dim);
    distance = place(end, 0, dim) - start;
  } else {
    start = place(start, 0, dim - 1);
    distance = start - place(end, -1, dim - 1);
  }
  // Steps may be as large as INT64_MAX: nothing is added to them.
  uint64_t size = step > 0 ? step : -static_cast<uint64_t>(step);
  return {start, step, distance <= 0 ? 0 : static_cast<int64_t>((static_cast<uint64_t>(distance) - 1) / size + 1)};
}

Step make_slice(const Args& args) {
  Tensor x = input(args, 0, "data"), y = output(args);
  want_dtype(y, x.dtype, "output");
  Shape starts = read_integers(args, 1, "starts"), ends = read_integers(args, 2, "ends");
  Shape axes = read_integers(args, 3, "axes"), steps = read_integers(args, 4, "steps");
  if (axes.empty()) {
    for (size_t i = 0; i < starts.size(); ++i) axes.push_back(i);
  }
  if (steps.empty()) steps.assign(starts.size(), 1);
  if (ends.size() != starts.size() || axes.size() != starts.size() || steps.size() != starts.size()) {
    refuse("starts, ends, axes and steps are of different lengths");
  }
  StridedCopy plan{x.shape, dense_strides(x.shape), {}};
  Shape strides = plan.from_strides;
  for (size_t i = 0; i < starts.size(); ++i) {
    int64_t axis = want_axis(axes[i], x.shape.size());
    Cut cut = cut_of(starts[i], ends[i], steps[i], x.shape[axis]);
    plan.dims[axis] = cut.count;
    plan.from_strides[axis] = cut.count > 1 ? strides[axis] * cut.step : 0;
    plan.from_offset += cut.count ? cut.start * strides[axis] : 0;
  }
  want_shape(y, plan.dims, "output");
  plan.to_strides = dense_strides(plan.dims);
  return copy_step(plan, x, y);
}

// Part [start, start + count) of `axis` of the whole; the other tensor is the part, dense.
StridedCopy part_of(const Shape& whole, int64_t axis, int64_t start, int64_t count, bool into_whole) {
  Shape dims = whole, strides = dense_strides(whole);
  dims[axis] = count;
  StridedCopy plan{dims, into_whole ? dense_strides(dims) : strides, into_whole ? strides : dense_strides(dims)};
  (into_whole ? plan.to_offset : plan.from_offset) = start * strides[axis];
  return plan;
}

Step in_order(std::vector<Step> steps) {
  return [steps = std::move(steps)](Context& context) {
    for (const Step& step : steps) step(context);
  };
}

void check_part(const Tensor& part, const Tensor& whole, int64_t axis) {
  want_dtype(part, whole.dtype, "part");
  bool fits = part.shape.size() == whole.shape.size();
  for (size_t i = 0; fits && i < whole.shape.size(); ++i)
    fits = static_cast<int64_t>(i) == axis || part.shape[i] == whole.shape[i];
  if (!fits) refuse("a part is " + describe(part) + ", the whole " + describe(whole));
}

Step make_concat(const Args& args) {
  Tensor whole = output(args);
  int64_t axis = want_axis(args.integer("axis", 0), whole.shape.size()), at = 0;
  std::vector<Step> steps;
  for (size_t i = 0; i < args.in.size(); ++i) {
    const Tensor& part = input(args, i, "part");
    check_part(part, whole, axis);
    steps.push_back(copy_step(part_of(whole.shape, axis, at, part.shape[axis], true), part, whole));
    at += part.shape[axis];
  }
  if (at != whole.shape[axis])
    refuse("the parts add up to " + std::to_string(at) + ", the whole is " + describe(whole));
  return in_order(std::move(steps));
}

// The outputs' shapes say where to cut; one that nobody wants may be missing when `split` (input 1 or attribute) or
// equal parts tell its size.
Step make_split(const Args& args) {
  Tensor whole = input(args, 0, "input");
  int64_t axis = want_axis(args.integer("axis", 0), whole.shape.size()), at = 0;
  Shape sizes = read_integers(args, 1, "split");
  int64_t count = args.out.size(), equal = count ? (whole.shape[axis] + count - 1) / count : 0;
  std::vector<Step> steps;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& part = args.out[i];
    int64_t size = i < static_cast<int64_t>(sizes.size()) ? sizes[i] : std::min(equal, whole.shape[axis] - at);
    if (part) {
      check_part(part, whole, axis);
      if (part.shape[axis] != size)
        refuse("output " + std::to_string(i) + " is " + describe(part) + ", wanted " + std::to_string(size) +
               " along the axis");
      steps.push_back(copy_step(part_of(whole.shape, axis, at, size, false), whole, part));
    }
    at += size;
  }
  if (at != whole.shape[axis])
    refuse("the parts add up to " + std::to_string(at) + ", the whole is " + describe(whole));
  return in_order(std::move(steps));
}

Step make_where(const Args& args) {
  Tensor condition = input(args, 0, "condition"), yes = input(args, 1, "X"), no = input(args, 2, "Y"),
         out = output(args);
  want_dtype(condition, DType::boolean, "condition");
  want_dtype(no, yes.dtype, "Y");
  want_dtype(out, yes.dtype, "output");
  auto walk = make_walk<3>(out.shape, {condition.shape, yes.shape, no.shape});
  int64_t element = size_of(yes.dtype);
  return [=](Context& context) {
    context.pool.parallel_for(walk.size, 16384, [&](int64_t begin, int64_t end, int) {
      walk_runs(walk, begin, end, end - begin, [&](int64_t at, const std::array<int64_t, 3>& offsets, int64_t n) {
        std::array<int64_t, 3> step;
        for (size_t k = 0; k < 3; ++k) step[k] = walk.strides[k].back();
        const auto* picks = static_cast<const uint8_t*>(condition.data) + offsets[0];
        const char* x = static_cast<const char*>(yes.data) + offsets[1] * element;
        const char* y = static_cast<const char*>(no.data) + offsets[2] * element;
        char* to = static_cast<char*>(out.data) + at * element;
        auto choose = [&](auto size) {
          for (int64_t i = 0; i < n; ++i) {
            const char* from = picks[i * step[0]] ? x + i * step[1] * size.value : y + i * step[2] * size.value;
            std::memcpy(to + i * size.value, from, size.value);
          }
        };
        if (element == 1) choose(std::integral_constant<int64_t, 1>{});
        if (element == 2) choose(std::integral_constant<int64_t, 2>{});
        if (element == 4) choose(std::integral_constant<int64_t, 4>{});
        if (element == 8) choose(std::integral_constant<int64_t, 8>{});
      });
    });
  };
}

Step make_trilu(const Args& args) {
  Tensor x = input(args, 0, "input"), y = output(args);
  want_shape(y, x.shape, "output");
  want_dtype(y, x.dtype, "output");
  if (x.shape.size() < 2) refuse("input is " + describe(x) + ", wanted a matrix");
  bool upper = args.integer("upper", 1) != 0;
  Shape shift = read_integers(args, 1, "k");
  int64_t k = shift.empty() ? 0 : shift[0], element = size_of(x.dtype);
  int64_t rows = x.shape[x.shape.size() - 2], columns = x.shape.back(), count = columns ? x.size() / columns : 0;
  return [=](Context& context) {
    context.pool.parallel_for(count, 1 + kGrainBytes / (1 + columns * element), [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t border = std::clamp<int64_t>(row % rows + k + (upper ? 0 : 1), 0, columns);
        int64_t first = upper ? border : 0, last = upper ? columns : border;
        char* to = static_cast<char*>(y.data) + row * columns * element;
        std::memset(to, 0, first * element);
        std::memset(to + last * element, 0, (columns - last) * element);
        std::memcpy(to + first * element, static_cast<const char*>(x.data) + (row * columns + first) * element,
                    (last - first) * element);
      }
    });
  };
}

}  // namespace

GENAI_KERNEL("Identity", make_copy);
GENAI_KERNEL("Reshape", make_copy);
GENAI_KERNEL("Squeeze", make_copy);
GENAI_KERNEL("Unsqueeze", make_copy);
GENAI_KERNEL("Flatten", make_copy);
GENAI_KERNEL("Transpose", make_transpose);
GENAI_KERNEL("Expand", make_expand);
GENAI_KERNEL("Tile", make_tile);
GENAI_KERNEL("Slice", make_slice);
GENAI_KERNEL("Concat", make_concat);
GENAI_KERNEL("Split", make_split);
GENAI_KERNEL("Where", make_where);
GENAI_KERNEL("Trilu", make_trilu);

}  // namespace genai::GENAI_ISA
