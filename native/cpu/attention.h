// Softmax attention over a contiguous K and V, shared by the kernels that differ in where K and V lie.
//
// One row is one query of one head. Keys are taken in splits at fixed positions (multiples of kSplit); a split gives a
// maximum, a sum and a weighted value, and splits are merged first to last. Nothing in that depends on which rows or
// threads work beside a row, so prefill, decode and any thread count give the same bits.
#pragma once

#include "cpu/check.h"
#include "threads.h"

namespace genai::GENAI_ISA {

// Rows [token][head] of head_dim elements inside a larger tensor; strides in elements.
struct HeadRows {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// `tensor` as rows of `num_heads`: [B, T, num_heads * D] (heads side by side, from column `first`) or [B, num_heads, T,
// D].
HeadRows head_rows(const Tensor& tensor, int64_t num_heads, int64_t head_dim, int64_t first = 0);

// Added to the scores; bool: false masks. Strides are 0 where the tensor broadcasts.
struct ScoreBias {
  Tensor tensor;  // missing: none
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0, key_stride = 0;
  int64_t num_keys = 0;  // 1 when it broadcasts over keys
};

ScoreBias score_bias(const Tensor& tensor, int64_t batch, int64_t num_heads, int64_t num_tokens);

// Keys and values of one sequence, in one dtype; only the first num_keys rows of a head are ever read.
struct KeyValue {
  HeadRows key, value;
  int64_t num_keys = 0;
};

// What happens to a row of q or k before the scores: RMS norm, then rotation, each rounded to the row's dtype.
struct RowTransform {
  Tensor norm;  // [D] or missing
  double epsilon = 1e-6;
  Tensor cos, sin;      // [max, R/2] or missing
  Tensor position_ids;  // [T] or missing: past_len + t
  bool interleaved = false;

  int64_t position(int64_t past_len, int64_t token) const;
  // Reads row (token, head) of `rows` into `to` [head_dim] and transforms it.
  void load(const HeadRows& rows, int64_t token, int64_t head, int64_t head_dim, int64_t past_len, float* to) const;
};

struct Attention {
  int64_t num_tokens = 0, num_heads = 0, kv_num_heads = 0, head_dim = 0, value_dim = 0;
  float scale = 1, softcap = 0;
  int64_t left = -1, right = 0;  // keys a query sees before and after its own position; -1: all
  bool bias_before_softcap = false;
  bool smooth = false;  // one more key of score 0 and value 0
  Tensor sink;          // [H]: that key's score per head
  ScoreBias bias;
  RowTransform transform;
  HeadRows query, output;

  // The first query stands at position `past_len`.
  void run(ThreadPool& pool, const KeyValue& kv, int64_t past_len) const;
  // Query `token` alone, for one head of K and V; it stands at `position`. The same bits as in `run`.
  void run_head(const KeyValue& kv, int64_t token, int64_t position, int64_t kv_head) const;
};

}  // namespace genai::GENAI_ISA
