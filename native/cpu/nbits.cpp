// MatMulNBits: rows times block-quantized weights, sixteen outputs at a time.
//
// accuracy_level 4: a row is rounded to int8 block by block (ONNX Runtime's rule: scale = max|x| / 127, level = round
// half even(x * 127/max|x|)); integer sums are exact, times both scales they are added up in f32, block after block.
// Other levels: weights are widened, (level - zero) * scale, and added up in f32, k after k. Either way an output is
// one fixed chain, whatever the number of rows, threads or tiles.
#include "cpu/nbits.h"

#include <algorithm>
#include <cmath>

#include "cpu/lanes.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

// Rows that share an unpacked panel.
#if defined(__AVX512F__)
constexpr int kTile = 8;
#else
constexpr int kTile = 4;
#endif

struct IntRowsTag;
struct RowsTag;
struct SumsTag;
struct WideTag;

// Rows of A as int8, with what the zero points need. Rows that share a tile lie side by side, so that a kernel walks
// along one address: a tile of R rows (kTile, the last one fewer) begins at its first row's place and is [k / 4][R][4]
// of levels, [block][R] of scales and starts.
struct IntRows {
  int8_t* levels;
  float* scales;
  int32_t* starts;  // minus the sum of the block's levels, times the zero point where all share one
};

// Sixteen levels as bytes.
inline void store_bytes(int8_t* to, const m16& levels) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(levels.part[0])));
#else
  int32_t wide[kLanes];
  std::memcpy(wide, &levels, sizeof(wide));
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(wide[i]);
#endif
}

inline int32_t sum_lanes(const m16& x) {
  int32_t lanes[kLanes], sum = 0;
  std::memcpy(lanes, &x, sizeof(lanes));
  for (int32_t lane : lanes) sum += lane;
  return sum;
}

// Rounds a block of `count` elements, padded with zeros to `size`, a multiple of 16; four levels every `stride` bytes.
// Returns the sum of its levels.
int32_t quantize_block(const float* x, int64_t count, int64_t size, int8_t* levels, int64_t stride, float& scale) {
  constexpr float kRound = 12582912.0f;       // 1.5 * 2^23: adding it leaves the integer, rounded half to even,
  constexpr int32_t kRoundBits = 0x4b400000;  // in the low bits
  auto at = [&](int64_t i) {
    return i + kLanes <= count ? load(x + i) : load_part(x + i, std::max<int64_t>(0, count - i));
  };
  v16 top = all(0.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    v16 value = at(i);
    top = larger(larger(value, -value), top);  // NaN is never larger
  }
  float largest = max_lanes(top);
  scale = largest / 127.0f;
  float inverse = scale == 0 ? 0.0f : 127.0f / largest;  // not 1 / scale: that rounds twice, and moves ties
  m16 sum{};
  for (int64_t i = 0; i < size; i += kLanes) {
    m16 level = float_as_bits(at(i) * inverse + kRound) - kRoundBits;
    int8_t bytes[kLanes];
    store_bytes(bytes, level);
    for (int64_t j = 0; j < kLanes; j += 4) std::memcpy(levels + (i + j) / 4 * stride, bytes + j, 4);
    sum += level;
  }
  return sum_lanes(sum);
}

void quantize_row(const PackedWeights& w, const float* x, int64_t row, int64_t num_rows, const IntRows& to) {
  int64_t tile = row / kTile * kTile, rows = std::min<int64_t>(kTile, num_rows - tile), place = row - tile;
  for (int64_t b = 0; b < w.num_blocks; ++b) {
    int64_t first = b * w.block_size, at = tile * w.num_blocks + b * rows + place;
    int64_t count = std::min(w.block_size, w.k - first);
    int8_t* levels = to.levels + tile * w.num_blocks * w.block_size + first * rows + place * 4;
    int32_t sum = quantize_block(x + first, count, w.block_size, levels, rows * 4, to.scales[at]);
    to.starts[at] = w.int_zeros.empty() ? -w.zero * sum : -sum;
  }
}

using Bytes = Pack<uint8_t, 64>;

inline Bytes load_bytes(const uint8_t* from) {
  return Bytes::make([&](int p) {
    Bytes::Part part;
    std::memcpy(&part, from + p * kRegister, kRegister);
    return part;
  });
}

// sums[r] += the four unsigned levels of row r times four signed ones; exact for levels up to `limit` (15 or 255).
template <bool kSmall>
inline m16 dot_four(const m16& sums, const Bytes& levels, int32_t four) {
#if defined(__AVX512VNNI__)
  m16 made;
  made.part[0] = reinterpret_cast<m16::Part>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums.part[0]), reinterpret_cast<__m512i>(levels.part[0]), _mm512_set1_epi32(four)));
  return made;
#elif defined(__AVX2__)
  if constexpr (!kSmall) {  // pairs of bytes times int8 would saturate at 16 bits: by nibbles they fit
    Bytes low = levels & uint8_t{15}, high = (levels >> 4) & uint8_t{15};
    m16 upper = dot_four<true>(m16{}, high, four);
    return dot_four<true>(sums + (upper << 4), low, four);
  } else {
    return m16::make([&](int p) {
#if defined(__AVX512BW__)
      __m512i pairs = _mm512_maddubs_epi16(reinterpret_cast<__m512i>(levels.part[p]), _mm512_set1_epi32(four));
      __m512i quads = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
      __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(levels.part[p]), _mm256_set1_epi32(four));
      __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
      return sums.part[p] + reinterpret_cast<m16::Part>(quads);
    });
  }
#else
  int8_t x[4];
  std::memcpy(x, &four, 4);
  uint8_t bytes[64];
  std::memcpy(bytes, &levels, 64);
  int32_t out[16];
  std::memcpy(out, &sums, 64);
  for (int r = 0; r < 16; ++r) {
    for (int j = 0; j < 4; ++j) out[r] += bytes[r * 4 + j] * x[j];
  }
  m16 made;
  std::memcpy(&made, out, 64);
  return made;
#endif
}

inline int32_t four_at(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return four;
}

inline v16 as_float(const m16& value) {
  return v16::make([&](int p) { return __builtin_convertvector(value.part[p], v16::Part); });
}

template <class P>
inline P load_lanes(const void* from) {
  P made;
  std::memcpy(&made, from, 64);
  return made;
}

// Where the integer sums of a row's block begin: what the zero points take off.
inline m16 start_of(const PackedWeights& w, int32_t start, int64_t at) {
  return w.int_zeros.empty() ? m16::all(start) : load_lanes<m16>(w.int_zeros.data() + at) * start;
}

// kRows rows of A with one panel: integer sums block by block. Few rows add up in two chains, or the latency shows.
template <int kRows>
void panel_int(const PackedWeights& w, const IntRows& rows, int64_t first, int64_t panel, float* out) {
  constexpr bool kTwo = kRows < 4;
  v16 totals[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) totals[r] = all(0.0f);
  const uint8_t* levels = w.levels.data() + panel * w.panel_bytes();
  int64_t groups = w.groups();
  const int8_t* x = rows.levels + first * w.num_blocks * w.block_size;
  const float* row_scales = rows.scales + first * w.num_blocks;
  const int32_t* starts = rows.starts + first * w.num_blocks;
  for (int64_t b = 0; b < w.num_blocks; ++b) {
    int64_t at = (panel * w.num_blocks + b) * 16;
    m16 even[kRows], odd[kTwo ? kRows : 1];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      even[r] = start_of(w, starts[b * kRows + r], at);
      if constexpr (kTwo) odd[r] = m16{};
    }
    if (w.bits == 4) {
      for (int64_t g = 0; g < groups; ++g, levels += 64, x += 8 * kRows) {
        Bytes both = load_bytes(levels), low = both & uint8_t{15}, high = (both >> 4) & uint8_t{15};
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) even[r] = dot_four<true>(even[r], low, four_at(x + r * 4));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          m16& sum = kTwo ? odd[kTwo ? r : 0] : even[r];
          sum = dot_four<true>(sum, high, four_at(x + (kRows + r) * 4));
        }
      }
    } else {
      for (int64_t g = 0; g < groups; ++g, levels += 64, x += 4 * kRows) {
        Bytes bytes = load_bytes(levels);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) even[r] = dot_four<false>(even[r], bytes, four_at(x + r * 4));
      }
    }
    v16 scale = load(w.scales.data() + at);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      m16 sum = even[r];
      if constexpr (kTwo) sum += odd[r];
      totals[r] = multiply_add(as_float(sum), scale * row_scales[b * kRows + r], totals[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store(out + r * 16, totals[r]);
}

// Block b of a panel as f32 [block_size][16].
void widen_block(const PackedWeights& w, int64_t panel, int64_t b, float* to) {
  const uint8_t* levels = w.levels.data() + panel * w.panel_bytes() + b * w.groups() * 64;
  int64_t at = (panel * w.num_blocks + b) * 16;
  v16 scale = load(w.scales.data() + at);
  v16 zero = w.zeros.empty() ? all(static_cast<float>(w.zero)) : load(w.zeros.data() + at);
  int32_t mask = w.bits == 4 ? 15 : 255;
  for (int64_t g = 0; g < w.groups(); ++g, levels += 64) {
    m16 words = load_lanes<m16>(levels);
    for (int half = 0; half < (w.bits == 4 ? 2 : 1); ++half) {
      for (int j = 0; j < 4; ++j, to += 16) store(to, (as_float((words >> (8 * j + 4 * half)) & mask) - zero) * scale);
    }
  }
}

template <int kRows>
void panel_wide(const float* x, int64_t stride, int64_t count, const float* block, float* totals) {
  v16 sums[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sums[r] = load(totals + r * 16);
  for (int64_t i = 0; i < count; ++i) {
    v16 weights = load(block + i * 16);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] = multiply_add(all(x[r * stride + i]), weights, sums[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) store(totals + r * 16, sums[r]);
}

// f32 rows with one panel: every block is widened once for all rows.
void panel_float(const PackedWeights& w, const float* rows, int64_t m, int64_t panel, float* block, float* out) {
  std::fill(out, out + m * 16, 0.0f);
  for (int64_t b = 0; b < w.num_blocks; ++b) {
    widen_block(w, panel, b, block);
    int64_t first = b * w.block_size, count = std::min(w.block_size, w.k - first), r = 0;
    for (; r + 4 <= m; r += 4) panel_wide<4>(rows + r * w.k + first, w.k, count, block, out + r * 16);
    for (; r < m; ++r) panel_wide<1>(rows + r * w.k + first, w.k, count, block, out + r * 16);
  }
}

struct Problem {
  std::shared_ptr<const PackedWeights> w;
  Tensor a, bias, y;
  int64_t m = 0;
  bool plain = false;  // sums are the f32 output
};

void write_panel(const Problem& p, int64_t panel, int64_t row, float* sums) {
  int64_t count = std::min<int64_t>(16, p.w->n - panel * 16);
  if (p.plain && count == kLanes) {
    std::memcpy(static_cast<float*>(p.y.data) + row * p.w->n + panel * 16, sums, sizeof(float) * kLanes);
    return;
  }
  if (p.bias) {
    float bias[16];
    read_block(p.bias.data, p.bias.dtype, panel * 16, count, bias);
    for (int64_t i = 0; i < count; ++i) sums[i] += bias[i];
  }
  write_block(p.y.data, p.y.dtype, row * p.w->n + panel * 16, count, sums);
}

const float* float_rows(const Problem& p) {
  return block_of(p.a, 0, p.m * p.w->k, scratch<float, RowsTag>(p.m * p.w->k + kLanes));
}

int64_t panels_of(const Problem& p) { return (p.w->n + 15) / 16; }

int64_t grain_of(const Problem& p) {
  constexpr int64_t kWorth = 64 * 1024;  // multiply-adds that pay for handing them to a thread
  return std::max<int64_t>(1, kWorth / std::max<int64_t>(1, p.m * p.w->k * 16));
}

using PanelInt = void (*)(const PackedWeights&, const IntRows&, int64_t, int64_t, float*);

template <int... kRows>
PanelInt panel_int_for(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr PanelInt kernels[] = {panel_int<kRows + 1>...};
  return kernels[rows - 1];
}

void int_panel(const Problem& p, const IntRows& rows, int64_t panel) {
  float sums[kTile * 16];
  for (int64_t row = 0; row < p.m; row += kTile) {
    int64_t count = std::min<int64_t>(kTile, p.m - row);
    panel_int_for(count, std::make_integer_sequence<int, kTile>())(*p.w, rows, row, panel, sums);
    for (int64_t r = 0; r < count; ++r) write_panel(p, panel, row + r, sums + r * 16);
  }
}

void run_int(const Problem& p, ThreadPool& pool) {
  const PackedWeights& w = *p.w;
  int64_t blocks = p.m * w.num_blocks, levels = (blocks * w.block_size + 63) / 64 * 64;
  auto* memory = scratch<char, IntRowsTag>(levels + blocks * 8);
  IntRows rows{reinterpret_cast<int8_t*>(memory), reinterpret_cast<float*>(memory + levels),
               reinterpret_cast<int32_t*>(memory + levels + blocks * 4)};
  const float* a = float_rows(p);
  int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, w.k));
  pool.parallel_for(p.m, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) quantize_row(w, a + row * w.k, row, p.m, rows);
  });
  pool.parallel_for(panels_of(p), grain_of(p), [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = begin; panel < end; ++panel) int_panel(p, rows, panel);
  });
}

void run_float(const Problem& p, ThreadPool& pool) {
  const float* a = float_rows(p);
  pool.parallel_for(panels_of(p), grain_of(p), [&](int64_t begin, int64_t end, int) {
    float* block = scratch<float, WideTag>(p.w->block_size * 16);
    float* sums = scratch<float, SumsTag>(p.m * 16);
    for (int64_t panel = begin; panel < end; ++panel) {
      panel_float(*p.w, a, p.m, panel, block, sums);
      for (int64_t row = 0; row < p.m; ++row) write_panel(p, panel, row, sums + row * 16);
    }
  });
}

void check_sizes(const Args& args, int64_t n, int64_t k, int64_t bits, int64_t block_size) {
  int64_t blocks = (k + block_size - 1) / block_size;
  const Tensor &b = input(args, 1, "B"), &scales = input(args, 2, "scales");
  want_dtype(b, DType::u8, "B");
  want_float(scales, "scales");
  if (b.size() != n * blocks * block_size * bits / 8) {
    refuse("MatMulNBits: B is " + describe(b) + ", wanted " + describe(Shape{n, blocks, block_size * bits / 8}));
  }
  if (scales.size() != n * blocks) {
    refuse("MatMulNBits: scales are " + describe(scales) + ", wanted " + describe(Shape{n, blocks}));
  }
  Tensor zeros = optional_input(args, 3);
  if (zeros) {
    int64_t lanes = 8 / bits, wanted = zeros.dtype == DType::u8 ? n * ((blocks + lanes - 1) / lanes) : n * blocks;
    if (zeros.dtype != DType::u8) want_float(zeros, "zero_points");
    if (zeros.size() != wanted) {
      refuse("MatMulNBits: zero_points are " + describe(zeros) + ", wanted " + std::to_string(wanted) + " elements");
    }
  }
}

Step matmul_nbits(const Args& args) {
  int64_t n = args.integer("N", 0), k = args.integer("K", 0), bits = args.integer("bits", 4);
  int64_t block_size = args.integer("block_size", 32), level = args.integer("accuracy_level", 0);
  if (args.integer("weight_prepacked", 0)) refuse("MatMulNBits: weight_prepacked weights hold another device's layout");
  if (bits != 4 && bits != 8) refuse("MatMulNBits: bits is " + std::to_string(bits) + ", wanted 4 or 8");
  if (block_size < 16 || block_size % 16) refuse("MatMulNBits: block_size must be a multiple of 16");
  if (optional_input(args, 4)) refuse("MatMulNBits: g_idx is not supported");
  check_sizes(args, n, k, bits, block_size);
  Problem p;
  p.a = input(args, 0, "A");
  p.y = output(args);
  p.bias = optional_input(args, 5);
  want_float(p.a, "A");
  want_float(p.y, "Y");
  if (p.a.shape.empty() || p.a.shape.back() != k)
    refuse("MatMulNBits: A is " + describe(p.a) + ", K " + std::to_string(k));
  if (p.bias && p.bias.size() != n) refuse("MatMulNBits: bias is " + describe(p.bias) + ", wanted N elements");
  p.m = k ? p.a.size() / k : 0;
  p.plain = p.y.dtype == DType::f32 && !p.bias;
  if (p.y.size() != p.m * n) refuse("MatMulNBits: the output is " + describe(p.y) + ", wanted M * N elements");
  Tensor zeros = optional_input(args, 3);
  p.w = packed(args.in[1], args.in[2], zeros, n, k, bits, block_size);
  if (level == 4 && zeros && zeros.dtype != DType::u8)
    refuse("MatMulNBits: accuracy_level 4 with float zero points is not supported");
  return [p = std::move(p), run = level == 4 ? run_int : run_float](Context& context) { run(p, context.pool); };
}

GENAI_KERNEL("MatMulNBits", matmul_nbits);

// -- GatherBlockQuantized ---------------------------------------------------------------------------------------------

Step gather_block_quantized(const Args& args) {
  const Tensor data = input(args, 0, "data"), indices = input(args, 1, "indices"), scales = input(args, 2, "scales");
  const Tensor zeros = optional_input(args, 3), y = output(args);
  int64_t bits = args.integer("bits", 4), block = args.integer("block_size", 128), lanes = bits ? 8 / bits : 0;
  want_dtype(data, DType::u8, "data");
  want_float(scales, "scales");
  want_float(y, "output");
  bool plain = data.shape.size() == 2 && args.integer("gather_axis", 0) == 0 && args.integer("quantize_axis", 1) == 1;
  if (!plain || (bits != 4 && bits != 8)) refuse("GatherBlockQuantized: wanted rows of a matrix with 4 or 8 bits");
  int64_t rows = data.shape[0], width = data.shape[1] * lanes, blocks = (width + block - 1) / block;
  int64_t zero_bytes = (blocks + lanes - 1) / lanes;
  want_shape(scales, {rows, blocks}, "scales");
  if (zeros) {
    want_dtype(zeros, DType::u8, "zero_points");
    want_shape(zeros, {rows, zero_bytes}, "zero_points");
  }
  if (y.size() != indices.size() * width) refuse("GatherBlockQuantized: the output is " + describe(y));
  return [=](Context& context) {
    const uint8_t* bytes = static_cast<const uint8_t*>(data.data);
    const uint8_t* zero_data = static_cast<const uint8_t*>(zeros.data);
    int32_t mask = (1 << bits) - 1;
    std::vector<float> row(width), scale(blocks);
    for (int64_t i = 0; i < indices.size(); ++i) {
      int64_t index = integer_at(indices, i);
      index += index < 0 ? rows : 0;
      if (index < 0 || index >= rows) {  // ONNX Runtime gives zeros
        std::fill(row.begin(), row.end(), 0.0f);
      } else {
        read_block(scales.data, scales.dtype, index * blocks, blocks, scale.data());
        for (int64_t j = 0; j < width; ++j) {
          int32_t level = bytes[index * data.shape[1] + j / lanes] >> (j % lanes * bits) & mask, b = j / block;
          int32_t zero = 1 << (bits - 1);
          if (zero_data) zero = zero_data[index * zero_bytes + b / lanes] >> (b % lanes * bits) & mask;
          row[j] = static_cast<float>(level - zero) * scale[b];
        }
      }
      write_block(y.data, y.dtype, i * width, width, row.data());
    }
  };
}

GENAI_KERNEL("GatherBlockQuantized", gather_block_quantized);

}  // namespace

void multiply_rows(ThreadPool& pool, const std::shared_ptr<const PackedWeights>& weights, const float* rows, int64_t m,
                   bool int8, float* y) {
  Problem p;
  p.w = weights;
  p.a = {const_cast<float*>(rows), DType::f32, {m, weights->k}};
  p.y = {y, DType::f32, {m, weights->n}};
  p.m = m;
  p.plain = true;
  int8 ? run_int(p, pool) : run_float(p, pool);
}

}  // namespace genai::GENAI_ISA
