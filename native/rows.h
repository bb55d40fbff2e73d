// Strided copies between KV buffers and pages.
#pragma once

#include <cstdint>

namespace genai {

// Rows of `row_bytes` at (head, position): address + head * head_stride + position * row_stride, strides in bytes.
struct RowGrid {
  char* address;
  int64_t head_stride;
  int64_t row_stride;
};

// Copies [num_heads, num_rows] rows. The grids must not overlap.
void copy_rows(RowGrid to, RowGrid from, int64_t num_heads, int64_t num_rows, int64_t row_bytes);

// One line of kv/mirror.py's copy table: heads x rows of row_bytes, strides in bytes.
struct CopyLine {
  int64_t to, from, num_heads, to_head_stride, from_head_stride, num_rows, to_row_stride, from_row_stride, row_bytes;
};

void copy_table(const CopyLine* lines, int64_t count);

}  // namespace genai
