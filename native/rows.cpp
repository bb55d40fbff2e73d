#include "rows.h"

#include <cstring>

namespace genai {

void copy_rows(RowGrid to, RowGrid from, int64_t num_heads, int64_t num_rows, int64_t row_bytes) {
  bool dense = to.row_stride == row_bytes && from.row_stride == row_bytes;
  if (num_rows <= 0 || row_bytes <= 0) return;
  for (int64_t head = 0; head < num_heads; ++head) {
    char* target = to.address + head * to.head_stride;
    const char* source = from.address + head * from.head_stride;
    if (dense) {
      std::memcpy(target, source, num_rows * row_bytes);
      continue;
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      std::memcpy(target + row * to.row_stride, source + row * from.row_stride, row_bytes);
    }
  }
}

void copy_table(const CopyLine* lines, int64_t count) {
  for (const CopyLine* line = lines; line != lines + count; ++line) {
    copy_rows({reinterpret_cast<char*>(line->to), line->to_head_stride, line->to_row_stride},
              {reinterpret_cast<char*>(line->from), line->from_head_stride, line->from_row_stride}, line->num_heads,
              line->num_rows, line->row_bytes);
  }
}

}  // namespace genai
