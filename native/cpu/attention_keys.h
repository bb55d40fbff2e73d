// Rows of queries with the keys and values of one head: scores, and values weighted by them.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/lanes.h"
#include "cpu/scratch.h"

namespace genai::GENAI_ISA {

constexpr int64_t kSplit = 512;    // keys of one partial result
constexpr int64_t kTileRows = 32;  // rows that share a pass over K and V
#if defined(__AVX512F__)
constexpr int kRows = 4, kKeys = 4;  // a register block of values; 32 vector registers hold it
#else
constexpr int kRows = 2, kKeys = 2;
#endif

struct KeyMemory;

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The keys [begin, end) a row sees.
struct Span {
  int64_t begin, end;
};

// Lane l of the result is sum_lanes of the sums of key l, where block[i] holds those of key 4 * (i % 4) + i / 4:
// sixteen sums go through the tree of sum_lanes together, two vectors' halves side by side.
#if defined(__AVX512F__)
inline v16 sum_each(const v16 (&block)[16]) {
  auto zmm = [](const v16& v) { return reinterpret_cast<__m512>(v.part[0]); };
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    __m512 a = zmm(block[2 * i]), b = zmm(block[2 * i + 1]);
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512 a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    __m512 a = four[2 * i], b = four[2 * i + 1];
    two[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  v16 sums;
  sums.part[0] = reinterpret_cast<v16::Part>(
      _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd)));
  return sums;
}
#else
inline v16 sum_each(const v16 (&block)[16]) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[4 * (i % 4) + i / 4] = sum_lanes(block[i]);
  return load(sums);
}
#endif

inline bool any_nan(const v16& x) {
  float sum = sum_lanes(x);
  return sum != sum;
}

// One query with sixteen keys. Few addresses and as many sums as there are registers for.
[[gnu::noinline]] inline v16 dot_keys(const float* q, const float* keys, int64_t stride, int64_t width) {
  v16 sums[16] = {};
  const float* quads[4] = {keys, keys + 4 * stride, keys + 8 * stride, keys + 12 * stride};
#if defined(__AVX512F__)
  for (int64_t d = 0; d < width; d += kLanes) {
    v16 query = load(q + d);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = multiply_add(query, load(quads[i % 4] + i / 4 * stride), sums[i]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) quads[i] += kLanes;
  }
#else
  for (int first = 0; first < 16; first += 4) {
    v16 four[4] = {};
    for (int64_t d = 0; d < width; d += kLanes) {
      v16 query = load(q + d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) four[i] = multiply_add(query, load(quads[i] + first / 4 * stride + d), four[i]);
    }
    std::copy(four, four + 4, sums + first);
  }
#endif
  return sum_each(sums);
}

// The sixteen rows that are read next: prefetchers of the machine stop at the end of a page, which is never far.
// Addresses beyond the end are harmless.
template <class T>
void fetch_rows(const T* rows, int64_t stride, int64_t head_dim) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kLanes; ++i) {
    for (int64_t d = 0; d < head_dim; d += kLine) __builtin_prefetch(rows + i * stride + d);
  }
}

// Rows of keys as f32 [16, width], zeros beyond `count` and beyond head_dim.
template <class T>
const float* pack_keys(const T* keys, int64_t stride, int64_t head_dim, int64_t count, int64_t width, float* packed) {
  for (int64_t i = 0; i < kLanes; ++i) {
    float* to = packed + i * width;
    int64_t filled = i < count ? head_dim : 0;
    if constexpr (std::is_same_v<T, float>) {
      if (filled) std::memcpy(to, keys + i * stride, head_dim * sizeof(float));
    } else {
      widen(keys + i * stride, to, filled);
    }
    std::fill(to + filled, to + width, 0.0f);
  }
  return packed;
}

// scores[row][j] = q[row] . key[j] for n keys of one head, and whatever up to a multiple of sixteen.
template <class T>
void score_keys(const float* q, int64_t num_rows, const T* keys, int64_t stride, int64_t head_dim, int64_t n,
                float* scores) {
  int64_t width = padded(head_dim);
  bool direct =
      std::is_same_v<T, float> && width == head_dim && reinterpret_cast<uintptr_t>(keys) % alignof(float) == 0;
  float* memory = scratch<float, KeyMemory>(kLanes * width);
  for (int64_t j = 0; j < n; j += kLanes) {
    int64_t count = std::min<int64_t>(kLanes, n - j);
    bool whole = direct && count == kLanes;
    const float* block = whole ? reinterpret_cast<const float*>(keys + j * stride)
                               : pack_keys(keys + j * stride, stride, head_dim, count, width, memory);
    fetch_rows(keys + (j + kLanes) * stride, stride, head_dim);
    for (int64_t row = 0; row < num_rows; ++row) {
      store(scores + row * kSplit + j, dot_keys(q + row * width, block, whole ? stride : width, width));
    }
  }
}

// values[i][:] += weights[i][j] * value[j][:] for keys [begin, end), one after the other.
template <int R, int C, class T>
[[gnu::noinline]] void weigh_block(const float* weights, Span keys, const T* value, int64_t value_stride, int64_t part,
                                   float* values, int64_t stride) {
  v16 sums[R][C];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[i][c] = load(values + i * stride + c * kLanes);
  }
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    v16 row[C];
    const T* from = value + j * value_stride;
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) row[c] = part ? load_part(from + c * kLanes, part) : load(from + c * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      v16 weight = all(weights[i * kSplit + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[i][c] = multiply_add(weight, row[c], sums[i][c]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(values + i * stride + c * kLanes, sums[i][c]);
  }
}

template <int R, class T>
void weigh_rows(const float* weights, Span keys, const T* value, int64_t value_stride, int64_t value_dim,
                float* values) {
  int64_t stride = padded(value_dim), d = 0;
  for (; d + kKeys * kLanes <= value_dim; d += kKeys * kLanes) {
    weigh_block<R, kKeys>(weights, keys, value + d, value_stride, 0, values + d, stride);
  }
  for (; d < value_dim; d += kLanes) {
    int64_t part = std::min(kLanes, value_dim - d);
    weigh_block<R, 1>(weights, keys, value + d, value_stride, part == kLanes ? 0 : part, values + d, stride);
  }
}

}  // namespace genai::GENAI_ISA
