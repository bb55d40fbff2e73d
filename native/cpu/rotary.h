// Rotary position embedding of one head's row.
#pragma once

#include <cstdint>

namespace genai::GENAI_ISA {

// Turns the pairs (row[i], row[half + i]), or (row[2i], row[2i+1]) when interleaved, by the angles of cos[half],
// sin[half].
inline void rotate_row(float* row, int64_t half, const float* cos, const float* sin, bool interleaved) {
  int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    float &x = row[i * step], &y = row[i * step + apart], turned = x * cos[i] - y * sin[i];
    y = y * cos[i] + x * sin[i];
    x = turned;
  }
}

}  // namespace genai::GENAI_ISA
