// Matrix products. Every output is one fixed chain of f32 operations, whatever the number of rows, threads or blocks:
// [K, N] weights: lanes run over N; K is cut into two halves, each output is a chain of fused multiply-adds over the k
// of either half in their order, and the two are added. (Halves, so that two threads read whole rows: memory is then
// one stream for each of them.) [N, K] weights (transB): sixteen chains over k mod 16, added in one fixed tree.
#include "cpu/matmul.h"

#include <algorithm>
#include <memory>

#include "cpu/lanes.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 3;
#endif
constexpr int kPanel = 2 * kLanes;     // columns of a packed panel
constexpr int64_t kDepth = 288;        // k steps of a packed panel: it stays in the first-level cache, nearly
constexpr int64_t kStreamRows = 4;     // up to here B is streamed once, unpacked
constexpr int kDeepRows = 4;           // rows of B that pass over the sums together
constexpr int64_t kBlock = 4096;       // columns of a streamed block: their sums stay in the first-level cache
constexpr int64_t kAheadBytes = 4096;  // how far ahead of its use B is fetched
constexpr int64_t kSmall = 32 * 1024;  // multiply-adds worth a thread

constexpr int64_t kHalve = 128;  // shorter sums are one chain

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
  bool plain = false;                     // sums are the f32 output
};

void finish_row(const Finish& finish, int64_t offset, int64_t row, int64_t column, int64_t count, float* sums) {
  if (finish.plain) {
    std::memcpy(static_cast<float*>(finish.y.data) + offset + column, sums, count * sizeof(float));
    return;
  }
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

void add_to(float* sums, const float* more, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += more[i];
}

template <class T>
v16 load_any(const T* from, int64_t n) {
  return n >= kLanes ? load(from) : load_part(from, n);
}

// How K is cut: [0, middle) and [middle, K).
int64_t num_halves(int64_t k) { return k >= kHalve ? 2 : 1; }

int64_t middle_of(int64_t k) { return num_halves(k) == 1 ? k : (k / 2 + 3) / 4 * 4; }

// kDeep rows of B from k on, for columns [first, first + width): adds to sums [M, N] at those columns.
template <int kDeep, class T>
void stream_rows(const Product& p, int64_t k, int64_t first, int64_t width, float* sums) {
  constexpr int64_t kLine = 64 / sizeof(T), kVectors = kLine / kLanes, kAhead = kAheadBytes / sizeof(T);
  const T* b = static_cast<const T*>(p.b) + k * p.n + first;
  // Prefetchers of the machine lose a stream that jumps from row to row. Whole rows follow each other: as many lines as
  // are read, at the distance; parts of rows: the rows after these. Addresses beyond the end are harmless.
  bool whole = width == p.n;
  const T* ahead = whole ? b + kAhead : b + kDeep * p.n;
  int64_t step = whole ? kLine : p.n, stride = whole ? kDeep : 1;
  for (int64_t m = 0; m < p.m; ++m) {
    float* row = sums + m * p.n + first;
    const float* a = p.a + m * p.k + k;
    int64_t j = 0;
    for (; j + kLine <= width; j += kLine) {
      v16 sum[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[v] = load(row + j + v * kLanes);
#pragma GCC unroll 8
      for (int d = 0; d < kDeep; ++d) {
        __builtin_prefetch(ahead + d * step + stride * j);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sum[v] = multiply_add(all(a[d]), load(b + d * p.n + j + v * kLanes), sum[v]);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(row + j + v * kLanes, sum[v]);
    }
    for (; j < width; j += kLanes) {
      int64_t count = std::min<int64_t>(kLanes, width - j);
      v16 sum = load_any(row + j, count);
      for (int d = 0; d < kDeep; ++d) sum = multiply_add(all(a[d]), load_any(b + d * p.n + j, count), sum);
      std::memcpy(row + j, &sum, count * sizeof(float));
    }
  }
}

// Columns [first, last) of one half of K; sums [M, N] of that half.
template <class T>
void stream_columns(const Product& p, int64_t half, int64_t first, int64_t last, float* sums) {
  int64_t middle = middle_of(p.k), begin = half ? middle : 0, end = half ? p.k : middle;
  for (; first < last; first += kBlock) {
    int64_t width = std::min(kBlock, last - first);
    for (int64_t m = 0; m < p.m; ++m) std::fill_n(sums + m * p.n + first, width, 0.0f);
    int64_t k = begin;
    for (; k + kDeepRows <= end; k += kDeepRows) stream_rows<kDeepRows, T>(p, k, first, width, sums);
    for (; k < end; ++k) stream_rows<1, T>(p, k, first, width, sums);
  }
}

// Few rows: B is read once.
template <class T>
void by_stream(const Product& p, const Finish& finish, int64_t offset, ThreadPool& pool) {
  int64_t halves = num_halves(p.k), item = p.m * p.n;
  int64_t grain = std::max<int64_t>(64, kSmall / std::max<int64_t>(1, p.k * p.m) / 64 * 64);
  float* sums = scratch<float, SumsTag>(halves * item + kLanes);
  int64_t count = (p.n + grain - 1) / grain * grain;  // both halves are cut at the same columns
  pool.parallel_for(halves * count, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t half = begin / count; half * count < end; ++half) {
      int64_t first = std::max<int64_t>(0, begin - half * count), last = std::min(p.n, end - half * count);
      if (first < last) stream_columns<T>(p, half, first, last, sums + half * item);
    }
  });
  pool.parallel_for(p.n, kBlock, [&](int64_t begin, int64_t end, int) {
    for (int64_t m = 0; m < p.m; ++m) {
      float* row = sums + m * p.n + begin;
      if (halves == 2) add_to(row, row + item, end - begin);
      finish_row(finish, offset + m * p.n, m, begin, end - begin, row);
    }
  });
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

// Rows of B that the next panel is packed from, one for each k step of a tile; nullptr: fetch nothing.
struct Ahead {
  const char* row = nullptr;
  int64_t stride = 0;
};

// kRows rows of A times a panel, on top of `carry` [kRows, 32] (nullptr: 0), into `sums` or, with `add`, added to them.
template <int kRows>
void tile(const float* a, int64_t stride, int64_t deep, const float* panel, const float* carry, float* sums, bool add,
          Ahead ahead) {
  v16 left[kRows], right[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    left[r] = carry ? load(carry + r * kPanel) : all(0.0f);
    right[r] = carry ? load(carry + r * kPanel + kLanes) : all(0.0f);
  }
  for (int64_t d = 0; d < deep; ++d, panel += kPanel) {
    v16 b0 = load(panel), b1 = load(panel + kLanes);
    if (ahead.row) {
      __builtin_prefetch(ahead.row, 0, 2);
      __builtin_prefetch(ahead.row + 64, 0, 2);
      ahead.row += ahead.stride;
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      v16 x = all(a[r * stride + d]);
      left[r] = multiply_add(x, b0, left[r]);
      right[r] = multiply_add(x, b1, right[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    float* to = sums + r * kPanel;
    store(to, add ? load(to) + left[r] : left[r]);
    store(to + kLanes, add ? load(to + kLanes) + right[r] : right[r]);
  }
}

using Tile = void (*)(const float*, int64_t, int64_t, const float*, const float*, float*, bool, Ahead);

template <int... kRows>
Tile tile_for(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr Tile tiles[] = {tile<kRows + 1>...};
  return tiles[rows - 1];
}

// Where the panel after the one at (k, first) begins; beyond the last there is nothing to fetch.
template <class T>
Ahead next_panel(const Product& p, int64_t k, int64_t first) {
  if (k >= p.k) {
    k = 0;
    first += kPanel;
  }
  if (first + kPanel > p.n) return {};
  return {reinterpret_cast<const char*>(static_cast<const T*>(p.b) + k * p.n + first),
          p.n * static_cast<int64_t>(sizeof(T))};
}

// One panel of columns for all rows: sums [M, 32], and as much behind them for an upper half of several panels. Memory
// is slow to answer reads that jump from row to row, so the first tile fetches what the next panel is packed from.
template <class T>
void panel_columns(const Product& p, int64_t first, float* panel, float* sums) {
  int64_t middle = middle_of(p.k), deep;
  for (int64_t k = 0; k < p.k; k += deep) {
    bool upper = k >= middle;
    deep = std::min(kDepth, (upper ? p.k : middle) - k);
    bool first_of_half = k == 0 || k == middle, last_of_upper = upper && k + deep == p.k;
    pack_panel<T>(p, k, deep, first, panel);
    float* own = sums + (upper ? p.m * kPanel : 0);
    float* out = last_of_upper ? sums : own;
    Ahead ahead = next_panel<T>(p, k + deep, first);
    for (int64_t m = 0; m < p.m; m += kTileRows) {
      int64_t rows = std::min<int64_t>(kTileRows, p.m - m);
      auto run = tile_for(rows, std::make_integer_sequence<int, kTileRows>());
      run(p.a + m * p.k + k, p.k, deep, panel, first_of_half ? nullptr : own + m * kPanel, out + m * kPanel,
          last_of_upper, m == 0 ? ahead : Ahead{});
    }
  }
}

template <class T>
void by_panels(const Product& p, const Finish& finish, int64_t offset, ThreadPool& pool) {
  int64_t per_column = std::max<int64_t>(1, p.k * p.m), halves = num_halves(p.k), item = p.m * kPanel;
  int64_t panels = (p.n + kPanel - 1) / kPanel, grain = std::max<int64_t>(1, kSmall / per_column / kPanel);
  pool.parallel_for(panels, grain, [&](int64_t begin, int64_t end, int) {
    float* panel = scratch<float, PanelTag>(std::min(kDepth, p.k) * kPanel + kLanes);
    float* sums = scratch<float, SumsTag>(halves * item);
    if (p.k == 0) std::fill_n(sums, item, 0.0f);
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
      if (kRows == 1)
        __builtin_prefetch(b + (c + kColumns) * k + i);  // the rows after these; beyond the end is harmless
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
    if (transposed) return by_rows<T>(p, finish, offset, pool);
    p.m <= kStreamRows ? by_stream<T>(p, finish, offset, pool) : by_panels<T>(p, finish, offset, pool);
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
  finish.plain = y.dtype == DType::f32 && finish.alpha == 1 && !finish.bias;
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

void multiply_rows(ThreadPool& pool, const float* rows, int64_t m, int64_t k, const void* weights, DType dtype,
                   int64_t n, float* y) {
  Finish finish;
  finish.y = {y, DType::f32, {m, n}};
  finish.plain = true;
  multiply({rows, weights, m, n, k}, dtype, true, finish, 0, pool);
}

}  // namespace genai::GENAI_ISA
