// Matrix products. Every output is one fixed chain of f32 operations, whatever the number of rows, threads or blocks:
// [K, N] weights: lanes run over N, each output is a chain of fused multiply-adds over k = 0, 1, 2, ...
// [N, K] weights (transB): sixteen chains over k mod 16, added in one fixed tree.
#include <algorithm>
#include <memory>

#include "cpu/check.h"
#include "cpu/lanes.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 3;
#endif
constexpr int kPanel = 2 * kLanes;     // columns of a packed panel
constexpr int64_t kDepth = 1024;       // k steps between loads and stores of the accumulators
constexpr int64_t kStreamRows = 4;     // up to here B is streamed once, unpacked
constexpr int64_t kAhead = 8;          // rows of B fetched before they are needed
constexpr int64_t kSmall = 32 * 1024;  // multiply-adds worth a thread

struct PanelTag;
struct SumsTag;
struct RowTag;

// One product of the batch: all f32 but B.
struct Product {
  const float* a = nullptr;  // [M, K]
  const void* b = nullptr;   // [K, N] or, transposed, [N, K]
  int64_t m = 0, n = 0, k = 0;
};

// What is done with finished sums.
struct Finish {
  Tensor y;
  Tensor bias;  // broadcasts to [M, N]; may be missing
  float alpha = 1, beta = 1;
  int64_t bias_row = 0, bias_column = 0;  // strides in elements; 0 repeats
};

void finish_row(const Finish& finish, int64_t offset, int64_t row, int64_t column, int64_t count, float* sums) {
  if (finish.alpha != 1) {
    for (int64_t i = 0; i < count; ++i) sums[i] *= finish.alpha;
  }
  if (finish.bias) {
    for (int64_t i = 0; i < count; ++i) {
      float value;
      read_block(finish.bias.data, finish.bias.dtype, row * finish.bias_row + (column + i) * finish.bias_column, 1,
                 &value);
      sums[i] += finish.beta * value;
    }
  }
  write_block(finish.y.data, finish.y.dtype, offset + column, count, sums);
}

template <class T>
v16 load_any(const T* from, int64_t n) {
  return n >= kLanes ? load(from) : load_part(from, n);
}

// Few rows: B is read once, row by row, four rows at a time; sums stay in the first-level cache.
template <class T>
void stream_columns(const Product& p, int64_t first, int64_t last, float* sums) {
  const T* b = static_cast<const T*>(p.b);
  int64_t width = last - first;
  std::fill(sums, sums + p.m * width, 0.0f);
  for (int64_t k = 0; k < p.k; k += 4) {
    int64_t deep = std::min<int64_t>(4, p.k - k);
    for (int64_t m = 0; m < p.m; ++m) {
      float* row = sums + m * width;
      const float* a = p.a + m * p.k + k;
      int64_t j = 0;
      if (deep == 4) {
        v16 a0 = all(a[0]), a1 = all(a[1]), a2 = all(a[2]), a3 = all(a[3]);
        const T *b0 = b + k * p.n + first, *b1 = b0 + p.n, *b2 = b1 + p.n, *b3 = b2 + p.n;
        const T* ahead =
            b0 + kAhead * p.n;  // prefetchers lose a stream that jumps from row to row; beyond the end is harmless
        for (; j + kLanes <= width; j += kLanes) {
          for (int d = 0; d < 4; ++d) __builtin_prefetch(ahead + d * p.n + j);
          v16 sum = load(row + j);
          sum = multiply_add(a0, load(b0 + j), sum);
          sum = multiply_add(a1, load(b1 + j), sum);
          sum = multiply_add(a2, load(b2 + j), sum);
          sum = multiply_add(a3, load(b3 + j), sum);
          store(row + j, sum);
        }
      }
      for (; j < width; j += kLanes) {
        int64_t count = std::min<int64_t>(kLanes, width - j);
        v16 sum = load_any(row + j, count);
        for (int64_t d = 0; d < deep; ++d) {
          sum = multiply_add(all(a[d]), load_any(b + (k + d) * p.n + first + j, count), sum);
        }
        std::memcpy(row + j, &sum, count * sizeof(float));
      }
    }
  }
}

// Columns [first, first + 32) of rows k.. of B as f32, zeros beyond the edge.
template <class T>
void pack_panel(const Product& p, int64_t k, int64_t deep, int64_t first, float* panel) {
  int64_t count = std::min<int64_t>(kPanel, p.n - first);
  for (int64_t d = 0; d < deep; ++d, panel += kPanel) {
    const T* from = static_cast<const T*>(p.b) + (k + d) * p.n + first;
    if (count == kPanel) {
      store(panel, load(from));
      store(panel + kLanes, load(from + kLanes));
    } else {
      store(panel, load_any(from, std::min<int64_t>(count, kLanes)));
      store(panel + kLanes, count > kLanes ? load_part(from + kLanes, count - kLanes) : all(0.0f));
    }
  }
}

// kRows rows of A times a panel; sums [kRows, 32] are carried on when `carry`.
template <int kRows>
void tile(const float* a, int64_t stride, int64_t deep, const float* panel, float* sums, bool carry) {
  v16 left[kRows], right[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    left[r] = carry ? load(sums + r * kPanel) : all(0.0f);
    right[r] = carry ? load(sums + r * kPanel + kLanes) : all(0.0f);
  }
  for (int64_t d = 0; d < deep; ++d, panel += kPanel) {
    v16 b0 = load(panel), b1 = load(panel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      v16 x = all(a[r * stride + d]);
      left[r] = multiply_add(x, b0, left[r]);
      right[r] = multiply_add(x, b1, right[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    store(sums + r * kPanel, left[r]);
    store(sums + r * kPanel + kLanes, right[r]);
  }
}

using Tile = void (*)(const float*, int64_t, int64_t, const float*, float*, bool);

template <int... kRows>
Tile tile_for(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr Tile tiles[] = {tile<kRows + 1>...};
  return tiles[rows - 1];
}

// One panel of columns for all rows.
template <class T>
void panel_columns(const Product& p, int64_t first, float* panel, float* sums) {
  for (int64_t k = 0; k < p.k || k == 0; k += kDepth) {
    int64_t deep = std::min(kDepth, p.k - k);
    pack_panel<T>(p, k, deep, first, panel);
    for (int64_t m = 0; m < p.m; m += kTileRows) {
      int64_t rows = std::min<int64_t>(kTileRows, p.m - m);
      tile_for(rows, std::make_integer_sequence<int, kTileRows>())(p.a + m * p.k + k, p.k, deep, panel,
                                                                   sums + m * kPanel, k > 0);
    }
  }
}

template <class T>
void by_columns(const Product& p, const Finish& finish, int64_t offset, ThreadPool& pool) {
  int64_t per_column = std::max<int64_t>(1, p.k * p.m);
  if (p.m <= kStreamRows) {
    int64_t grain = std::max<int64_t>(64, kSmall / per_column / 64 * 64);
    pool.parallel_for(p.n, grain, [&](int64_t begin, int64_t end, int) {
      float* sums = scratch<float, SumsTag>(p.m * (end - begin) + kLanes);
      stream_columns<T>(p, begin, end, sums);
      for (int64_t m = 0; m < p.m; ++m) {
        finish_row(finish, offset + m * p.n, m, begin, end - begin, sums + m * (end - begin));
      }
    });
    return;
  }
  int64_t panels = (p.n + kPanel - 1) / kPanel, grain = std::max<int64_t>(1, kSmall / per_column / kPanel);
  pool.parallel_for(panels, grain, [&](int64_t begin, int64_t end, int) {
    float* panel = scratch<float, PanelTag>(std::min(kDepth, p.k) * kPanel + kLanes);
    float* sums = scratch<float, SumsTag>(p.m * kPanel);
    for (int64_t i = begin; i < end; ++i) {
      panel_columns<T>(p, i * kPanel, panel, sums);
      int64_t count = std::min<int64_t>(kPanel, p.n - i * kPanel);
      for (int64_t m = 0; m < p.m; ++m) finish_row(finish, offset + m * p.n, m, i * kPanel, count, sums + m * kPanel);
    }
  });
}

// kRows rows of A with kColumns rows of B, both along k.
template <class T, int kRows, int kColumns>
void dots(const float* a, int64_t a_stride, const T* b, int64_t k, float* out, int64_t out_stride) {
  v16 sums[kRows][kColumns];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sums[r][c] = all(0.0f);
  }
  for (int64_t i = 0; i < k; i += kLanes) {
    int64_t count = std::min<int64_t>(kLanes, k - i);
    v16 x[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) x[r] = load_any(a + r * a_stride + i, count);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      v16 w = load_any(b + c * k + i, count);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r][c] = multiply_add(x[r], w, sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) out[r * out_stride + c] = sum_lanes(sums[r][c]);
  }
}

template <class T>
void dot_tile(const float* a, int64_t stride, int64_t rows, const T* b, int64_t columns, int64_t k, float* out) {
  constexpr int kOut = 4;
  if (rows == 4 && columns == 4) return dots<T, 4, 4>(a, stride, b, k, out, kOut);
  for (int64_t r = 0; r < rows; ++r) {
    if (columns == 4) {
      dots<T, 1, 4>(a + r * stride, stride, b, k, out + r * kOut, kOut);
    } else {
      for (int64_t c = 0; c < columns; ++c)
        dots<T, 1, 1>(a + r * stride, stride, b + c * k, k, out + r * kOut + c, kOut);
    }
  }
}

template <class T>
void by_rows(const Product& p, const Finish& finish, int64_t offset, ThreadPool& pool) {
  int64_t grain = std::max<int64_t>(4, kSmall / std::max<int64_t>(1, p.k * p.m) / 4 * 4);
  pool.parallel_for(p.n, grain, [&](int64_t begin, int64_t end, int) {
    int64_t width = end - begin;
    float* sums = scratch<float, SumsTag>(4 * (width + 4));
    for (int64_t m = 0; m < p.m; m += 4) {
      int64_t rows = std::min<int64_t>(4, p.m - m);
      for (int64_t n = begin; n < end; n += 4) {
        int64_t columns = std::min<int64_t>(4, end - n);
        float out[16];
        dot_tile(p.a + m * p.k, p.k, rows, static_cast<const T*>(p.b) + n * p.k, columns, p.k, out);
        for (int64_t r = 0; r < rows; ++r)
          std::memcpy(sums + r * width + n - begin, out + r * 4, columns * sizeof(float));
      }
      for (int64_t r = 0; r < rows; ++r) {
        finish_row(finish, offset + (m + r) * p.n, m + r, begin, width, sums + r * width);
      }
    }
  });
}

void multiply(const Product& p, DType dtype, bool transposed, const Finish& finish, int64_t offset, ThreadPool& pool) {
  auto run = [&](auto sample) {
    using T = decltype(sample);
    transposed ? by_rows<T>(p, finish, offset, pool) : by_columns<T>(p, finish, offset, pool);
  };
  if (dtype == DType::f32) return run(float{});
  if (dtype == DType::f16) return run(half_t{});
  run(bfloat_t{});
}

// -- factories --------------------------------------------------------------------------------------------------------

// Where each product of the batch finds its operands, in elements.
struct Batch {
  std::vector<int64_t> a, b;
};

Shape with_rank(const Shape& shape, size_t rank) {
  Shape padded(rank, 1);
  std::copy(shape.begin(), shape.end(), padded.begin() + (rank - shape.size()));
  return padded;
}

Batch batch_of(const Shape& a, const Shape& b, int64_t a_size, int64_t b_size) {
  size_t rank = std::max(a.size(), b.size());
  Shape left = with_rank(a, rank), right = with_rank(b, rank), index(rank, 0);
  int64_t count = 1;
  for (size_t i = 0; i < rank; ++i) {
    if (left[i] != right[i] && left[i] != 1 && right[i] != 1) {
      refuse("MatMul: batches " + describe(a) + " and " + describe(b) + " do not broadcast");
    }
    count *= left[i] == 1 ? right[i] : left[i];
  }
  Batch batch;
  for (int64_t item = 0; item < count; ++item) {
    int64_t rest = item, at_a = 0, at_b = 0, step_a = a_size, step_b = b_size;
    for (size_t i = rank; i-- > 0;) {
      int64_t dim = left[i] == 1 ? right[i] : left[i], at = rest % dim;
      rest /= dim;
      at_a += left[i] == 1 ? 0 : at * step_a;
      at_b += right[i] == 1 ? 0 : at * step_b;
      step_a *= left[i];
      step_b *= right[i];
    }
    batch.a.push_back(at_a);
    batch.b.push_back(at_b);
  }
  return batch;
}

// A as f32 rows [M, K], turned when transA; copied only where it is something else.
const float* rows_of(const Tensor& a, int64_t m, int64_t k, bool turned, float* memory) {
  int64_t size = a.size();
  const float* values = block_of(a, 0, size, memory);
  if (!turned) return values;
  float* to = memory + size;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < k; ++j) to[i * k + j] = values[j * m + i];
  }
  return to;
}

Step matmul(const Args& args) {
  const Tensor &a = input(args, 0, "A"), &b = input(args, 1, "B"), &y = output(args);
  want_float(a, "A");
  want_float(b, "B");
  want_float(y, "Y");
  bool turned_a = args.integer("transA", 0), turned_b = args.integer("transB", 0);
  if (a.shape.empty() || b.shape.empty()) refuse("MatMul: operands need a rank of at least 1");
  Shape left = a.shape, right = b.shape;
  if (left.size() == 1) left.insert(left.begin(), 1);
  if (right.size() == 1) right.push_back(1);
  if (turned_a && left.size() != 2) refuse("MatMul: transA needs a matrix, found " + describe(a));
  Product product;
  size_t ra = left.size(), rb = right.size();
  product.m = turned_a ? left[1] : left[ra - 2];
  product.k = turned_a ? left[0] : left[ra - 1];
  product.n = turned_b ? right[rb - 2] : right[rb - 1];
  int64_t depth = turned_b ? right[rb - 1] : right[rb - 2];
  if (depth != product.k) refuse("MatMul: " + describe(a) + " times " + describe(b) + ": inner sizes differ");
  Shape batch_a(left.begin(), left.end() - 2), batch_b(right.begin(), right.end() - 2);
  if (!turned_a && batch_b.empty()) {  // all rows of A meet the one B
    product.m = product.k ? a.size() / product.k : product.m * genai::GENAI_ISA::product(batch_a, 0, batch_a.size());
    batch_a.clear();
  }
  Batch batch = batch_of(batch_a, batch_b, product.m * product.k, product.n * product.k);
  if (static_cast<int64_t>(batch.a.size()) * product.m * product.n != y.size()) {
    refuse("MatMul: the output is " + describe(y) + ", which does not fit " + describe(a) + " times " + describe(b));
  }
  Finish finish;
  finish.y = y;
  finish.alpha = static_cast<float>(args.real("alpha", 1.0));
  finish.beta = static_cast<float>(args.real("beta", 1.0));
  finish.bias = optional_input(args, 2);
  if (finish.bias) {
    want_float(finish.bias, "C");
    Shape bias = with_rank(finish.bias.shape, 2);
    bool fits = finish.bias.shape.size() <= 2 && (bias[0] == 1 || bias[0] == product.m) &&
                (bias[1] == 1 || bias[1] == product.n);
    if (!fits) refuse("MatMul: C is " + describe(finish.bias) + ", which does not broadcast to the output");
    finish.bias_column = bias[1] == 1 ? 0 : 1;
    finish.bias_row = bias[0] == 1 ? 0 : bias[1];
  }
  int64_t item = size_of(b.dtype);
  return [=](Context& context) {
    const float* rows = rows_of(a, product.m, product.k, turned_a, scratch<float, RowTag>(2 * a.size() + kLanes));
    for (size_t i = 0; i < batch.a.size(); ++i) {
      Product one = product;
      one.a = rows + batch.a[i];
      one.b = static_cast<const char*>(b.data) + batch.b[i] * item;
      multiply(one, b.dtype, turned_b, finish, static_cast<int64_t>(i) * product.m * product.n, context.pool);
    }
  };
}

GENAI_KERNEL("MatMul", matmul);
GENAI_KERNEL("Gemm", matmul);

}  // namespace
}  // namespace genai::GENAI_ISA
