// Gather: rows of an embedding table, or slices along any axis.
#include <algorithm>
#include <cstring>

#include "cpu/check.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

int64_t index_at(const Tensor& indices, int64_t i, int64_t dim) {
  int64_t index = integer_at(indices, i);
  if (index < -dim || index >= dim) {
    throw std::out_of_range("Gather: index " + std::to_string(index) + " is outside a dimension of " +
                            std::to_string(dim));
  }
  return index < 0 ? index + dim : index;
}

Step make_gather(const Args& args) {
  Tensor data = input(args, 0, "data"), indices = input(args, 1, "indices"), out = output(args);
  if (indices.dtype != DType::i32) want_dtype(indices, DType::i64, "indices");
  want_dtype(out, data.dtype, "output");
  int64_t rank = data.shape.size(), axis = want_axis(args.integer("axis", 0), rank);
  Shape wanted(data.shape.begin(), data.shape.begin() + axis);
  wanted.insert(wanted.end(), indices.shape.begin(), indices.shape.end());
  wanted.insert(wanted.end(), data.shape.begin() + axis + 1, data.shape.end());
  want_shape(out, wanted, "output");
  int64_t outer = product(data.shape, 0, axis), dim = data.shape[axis];
  int64_t row = product(data.shape, axis + 1, rank) * size_of(data.dtype), count = indices.size();
  return [=](Context& context) {
    auto* from = static_cast<const char*>(data.data);
    auto* to = static_cast<char*>(out.data);
    int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, row));
    context.pool.parallel_for(outer * count, grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t source = i / count * dim + index_at(indices, i % count, dim);
        std::memcpy(to + i * row, from + source * row, row);
      }
    });
  };
}

}  // namespace

GENAI_KERNEL("Gather", make_gather);

}  // namespace genai::GENAI_ISA
