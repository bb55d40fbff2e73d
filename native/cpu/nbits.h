// Block-quantized weights [N, K], repacked for sixteen rows at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/check.h"
#include "huge.h"
#include "threads.h"

namespace genai::GENAI_ISA {

template <class T>
using HugeVector = std::vector<T, HugePages<T>>;

// Panels of sixteen rows. Levels of one panel: for every group of k, 64 bytes, row by row, four bytes a row.
// 4 bits: a group is 8 k; byte j of a row holds k + j in its low and k + 4 + j in its high nibble.
// 8 bits: a group is 4 k, a byte each.
// Rows beyond N and k beyond K are zero levels with zero scales.
struct PackedWeights {
  int64_t n = 0, k = 0, bits = 4, block_size = 32;
  int64_t num_blocks = 0;          // of a row
  HugeVector<uint8_t> levels;      // [panel][block][group][64]
  HugeVector<float> scales;        // [panel][block][16]
  HugeVector<float> zeros;         // [panel][block][16]; empty: all `zero`
  std::vector<int32_t> int_zeros;  // the same as integers, where they are
  int32_t zero = 8;

  int64_t groups() const { return block_size / group_size(); }  // of a block
  int64_t group_size() const { return bits == 4 ? 8 : 4; }
  int64_t panel_bytes() const { return num_blocks * groups() * 64; }
};

// Packs once per source: steps over the same bytes (prefill and decode, shared embeddings) get the same copy.
std::shared_ptr<const PackedWeights> packed(const Tensor& levels, const Tensor& scales, const Tensor& zero_points,
                                            int64_t n, int64_t k, int64_t bits, int64_t block_size);

// y [m, n] = rows [m, k] times the weights, with the sums of MatMulNBits; int8: rows are rounded as at
// accuracy_level 4.
void multiply_rows(ThreadPool& pool, const std::shared_ptr<const PackedWeights>& weights, const float* rows, int64_t m,
                   bool int8, float* y);

}  // namespace genai::GENAI_ISA
