// RotaryEmbedding in both spellings: ai.onnx (X, cos, sin, position_ids) and com.microsoft (X, position_ids, cos, sin).
#include "cpu/rotary.h"

#include "cpu/check.h"
#include "cpu/convert.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

struct Row;

struct Rotary {
  Tensor x, cos, sin, ids{}, y{};
  int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0, half = 0;
  bool heads_first = false, interleaved = false, offsets = false;  // offsets: one id, the first token's position

  int64_t position(int64_t b, int64_t t) const {
    if (!ids) return b * tokens + t;  // the caches are gathered already
    return offsets ? integer_at(ids, 0) + t : integer_at(ids, b * tokens + t);
  }

  int64_t offset(int64_t b, int64_t t, int64_t h) const {
    return (heads_first ? (b * heads + h) * tokens + t : (b * tokens + t) * heads + h) * head_dim;
  }
};

void rotate(const Rotary& r, int64_t token) {
  float* memory = scratch<float, Row>(3 * r.head_dim);
  int64_t b = token / r.tokens, t = token % r.tokens, at = r.position(b, t),
          rows = r.cos.size() / std::max<int64_t>(1, r.half);
  if (at < 0 || at >= rows) {
    throw std::out_of_range("RotaryEmbedding: position " + std::to_string(at) + " is outside a cache of " +
                            std::to_string(rows));
  }
  const float* cos = block_of(r.cos, at * r.half, r.half, memory);
  const float* sin = block_of(r.sin, at * r.half, r.half, memory + r.head_dim);
  float* row = memory + 2 * r.head_dim;
  for (int64_t h = 0; h < r.heads; ++h) {
    read_block(r.x.data, r.x.dtype, r.offset(b, t, h), r.head_dim, row);
    rotate_row(row, r.half, cos, sin, r.interleaved);
    write_block(r.y.data, r.y.dtype, r.offset(b, t, h), r.head_dim, row);
  }
}

// Where heads and tokens are in [B, H, T, D] or [B, T, H * D].
void bind_shape(Rotary& r, int64_t num_heads, int64_t head_dim) {
  const Shape& shape = r.x.shape;
  if (shape.size() != 3 && shape.size() != 4)
    refuse("X is " + describe(r.x) + ", wanted [B, H, T, D] or [B, T, H * D]");
  r.heads_first = shape.size() == 4;
  r.batch = shape[0];
  r.tokens = shape[r.heads_first ? 2 : 1];
  if (r.heads_first) {
    r.heads = shape[1];
    r.head_dim = shape[3];
  } else {
    r.head_dim = num_heads > 0 ? shape[2] / num_heads : head_dim;
    if (r.head_dim < 1 || shape[2] % r.head_dim)
      refuse("X is " + describe(r.x) + ": wanted a multiple of the head size " + std::to_string(r.head_dim));
    r.heads = shape[2] / r.head_dim;
  }
}

Step rotary_step(Rotary r, const Args& args) {
  want_float(r.x, "X");
  want_shape(r.y, r.x.shape, "Y");
  want_dtype(r.y, r.x.dtype, "Y");
  want_float(r.cos, "cos_cache");
  want_dtype(r.sin, r.cos.dtype, "sin_cache");
  want_shape(r.sin, r.cos.shape, "sin_cache");
  r.interleaved = args.integer("interleaved", 0) != 0;
  int64_t wanted = args.integer("rotary_embedding_dim", 0);
  r.half = r.cos.shape.back();
  if (wanted && wanted != 2 * r.half)
    refuse("rotary_embedding_dim is " + std::to_string(wanted) + ", cos_cache " + describe(r.cos));
  if (2 * r.half > r.head_dim)
    refuse("cos_cache is " + describe(r.cos) + ", wanted at most " + std::to_string(r.head_dim / 2) + " columns");
  if (r.ids && r.ids.dtype != DType::i32) want_dtype(r.ids, DType::i64, "position_ids");
  int64_t num_ids = r.offsets ? 1 : r.batch * r.tokens;
  if (r.ids && r.ids.size() != num_ids)
    refuse("position_ids is " + describe(r.ids) + ", wanted " + std::to_string(num_ids) + " elements");
  int64_t work = r.heads * r.head_dim;
  return [=](Context& context) {
    context.pool.parallel_for(r.batch * r.tokens, 1 + 8192 / (1 + work), [&](int64_t begin, int64_t end, int) {
      for (int64_t token = begin; token < end; ++token) rotate(r, token);
    });
  };
}

Step make_onnx(const Args& args) {
  Rotary r{input(args, 0, "X"), input(args, 1, "cos_cache"), input(args, 2, "sin_cache"), optional_input(args, 3),
           output(args)};
  if (r.cos.shape.empty()) refuse("cos_cache is a scalar");
  bind_shape(r, args.integer("num_heads", 0), 0);
  r.offsets = false;
  Shape gathered{r.batch, r.tokens, r.cos.shape.back()};
  if (!r.ids) want_shape(r.cos, gathered, "cos_cache");
  return rotary_step(r, args);
}

Step make_microsoft(const Args& args) {
  Rotary r{input(args, 0, "input"), input(args, 2, "cos_cache"), input(args, 3, "sin_cache"),
           input(args, 1, "position_ids"), output(args)};
  if (args.integer("is_packed_batching", 0)) refuse("is_packed_batching has no kernel");
  if (args.real("scale", 1.0) != 1.0) refuse("attribute `scale` other than 1 has no kernel");
  if (r.cos.shape.size() != 2) refuse("cos_cache is " + describe(r.cos) + ", wanted a matrix");
  bind_shape(r, args.integer("num_heads", 0), 2 * r.cos.shape[1]);
  r.offsets = r.ids.size() == 1 && r.ids.shape.size() < 2;
  return rotary_step(r, args);
}

}  // namespace

GENAI_KERNEL("RotaryEmbedding", make_onnx);
GENAI_KERNEL("com.microsoft.RotaryEmbedding", make_microsoft);

}  // namespace genai::GENAI_ISA
