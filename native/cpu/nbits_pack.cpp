// Repacking of MatMulNBits weights, shared between steps.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "cpu/convert.h"
#include "cpu/nbits.h"

namespace genai::GENAI_ISA {
namespace {

using Key = std::tuple<const void*, const void*, const void*, int64_t, int64_t, int64_t, int64_t>;

struct Shared {
  std::mutex mutex;
  std::map<Key, std::weak_ptr<const PackedWeights>> entries;
};

Shared& shared() {
  static Shared* all = new Shared;  // never destroyed: steps may outlive static destruction
  return *all;
}

// Nibbles k0..k7 of a little-endian word -> bytes k0 | k4 << 4, k1 | k5 << 4, ...
uint32_t interleave(uint32_t word) {
  auto spread = [](uint32_t half) {
    half = (half | half << 8) & 0x00ff00ffu;
    return (half | half << 4) & 0x0f0f0f0fu;
  };
  return spread(word & 0xffffu) | spread(word >> 16) << 4;
}

void pack_row(PackedWeights& to, const uint8_t* from, int64_t row) {
  int64_t stride = to.num_blocks * to.block_size * to.bits / 8, groups = to.num_blocks * to.groups();
  const uint8_t* source = from + row * stride;
  uint8_t* target = to.levels.data() + row / 16 * to.panel_bytes() + row % 16 * 4;
  for (int64_t g = 0; g < groups; ++g) {
    uint32_t word;
    std::memcpy(&word, source + g * 4, 4);
    if (to.bits == 4) word = interleave(word);
    std::memcpy(target + g * 64, &word, 4);
  }
}

void pack_rows(PackedWeights& to, const Tensor& levels, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) pack_row(to, static_cast<const uint8_t*>(levels.data), row);
}

// [N][blocks] values -> [panel][block][16].
void spread_values(const PackedWeights& to, const std::vector<float>& values, HugeVector<float>& panels) {
  panels.assign((to.n + 15) / 16 * to.num_blocks * 16, 0.0f);
  for (int64_t row = 0; row < to.n; ++row) {
    for (int64_t b = 0; b < to.num_blocks; ++b) {
      panels[(row / 16 * to.num_blocks + b) * 16 + row % 16] = values[row * to.num_blocks + b];
    }
  }
}

void pack_zeros(PackedWeights& to, const Tensor& zero_points) {
  std::vector<float> values(to.n * to.num_blocks);
  if (zero_points.dtype == DType::u8) {
    int64_t lanes = 8 / to.bits, bytes = (to.num_blocks + lanes - 1) / lanes;
    const uint8_t* data = static_cast<const uint8_t*>(zero_points.data);
    for (int64_t row = 0; row < to.n; ++row) {
      for (int64_t b = 0; b < to.num_blocks; ++b) {
        int value = data[row * bytes + b / lanes] >> (b % lanes * to.bits);
        values[row * to.num_blocks + b] = static_cast<float>(value & ((1 << to.bits) - 1));
      }
    }
  } else {
    read_block(zero_points.data, zero_points.dtype, 0, to.n * to.num_blocks, values.data());
  }
  spread_values(to, values, to.zeros);
  if (zero_points.dtype == DType::u8) to.int_zeros.assign(to.zeros.begin(), to.zeros.end());
}

std::shared_ptr<const PackedWeights> pack(const Tensor& levels, const Tensor& scales, const Tensor& zero_points,
                                          int64_t n, int64_t k, int64_t bits, int64_t block_size) {
  auto made = std::make_shared<PackedWeights>();
  PackedWeights& to = *made;
  to.n = n, to.k = k, to.bits = bits, to.block_size = block_size;
  to.num_blocks = (k + block_size - 1) / block_size;
  to.zero = 1 << (bits - 1);
  to.levels.assign((n + 15) / 16 * to.panel_bytes(), 0);
  std::vector<float> values(n * to.num_blocks);
  read_block(scales.data, scales.dtype, 0, n * to.num_blocks, values.data());
  spread_values(to, values, to.scales);
  if (zero_points) pack_zeros(to, zero_points);
  int64_t half = n / 2;
  if (levels.size() > 1 << 20) {  // factories run before the pool is theirs to use
    std::thread other([&] { pack_rows(to, levels, 0, half); });
    pack_rows(to, levels, half, n);
    other.join();
  } else {
    pack_rows(to, levels, 0, n);
  }
  return made;
}

}  // namespace

std::shared_ptr<const PackedWeights> packed(const Tensor& levels, const Tensor& scales, const Tensor& zero_points,
                                            int64_t n, int64_t k, int64_t bits, int64_t block_size) {
  Key key{levels.data, scales.data, zero_points.data, n, k, bits, block_size};
  std::lock_guard lock(shared().mutex);
  auto& entry = shared().entries[key];
  auto found = entry.lock();
  if (!found) entry = found = pack(levels, scales, zero_points, n, k, bits, block_size);
  return found;
}

}  // namespace genai::GENAI_ISA
