// genai.Attention: new keys and values are appended to KV slots, then the new queries attend over everything held.
#include <cmath>

#include "cpu/attention.h"
#include "cpu/lanes.h"
#include "cpu/scratch.h"

namespace genai::GENAI_ISA {
namespace {

constexpr int64_t kMostHeadDim = 1024;
struct Memory;

struct SlotAttention {
  Attention attention;
  RowTransform key_transform;
  HeadRows key, value;
  bool appends = true;  // without new keys the slots are read as they are
  int64_t key_slot = 0, value_slot = 0;
};

const KvBuffer& slot_at(const Sequence& sequence, int64_t index, int64_t num_heads, int64_t head_dim, int64_t total) {
  if (index >= static_cast<int64_t>(sequence.kv.size()))
    throw std::out_of_range("genai.Attention: no KV slot " + std::to_string(index));
  const KvBuffer& slot = sequence.kv[index];
  if (slot.num_heads != num_heads || slot.head_dim != head_dim || slot.capacity < total) {
    throw std::invalid_argument("genai.Attention: KV slot " + std::to_string(index) + " is " +
                                describe(Shape{slot.num_heads, slot.capacity, slot.head_dim}) + ", wanted " +
                                describe(Shape{num_heads, total, head_dim}));
  }
  return slot;
}

HeadRows rows_of(const KvBuffer& slot) { return {slot.data, slot.dtype, slot.head_dim, slot.capacity * slot.head_dim}; }

void append_row(const KvBuffer& slot, int64_t head, int64_t position, const float* row) {
  write_block(slot.data, slot.dtype, (head * slot.capacity + position) * slot.head_dim, slot.head_dim, row);
}

// K and V of one new token, for one head.
void append_head(const SlotAttention& self, const KvBuffer& keys, const KvBuffer& values, int64_t past_len,
                 int64_t token, int64_t head, int64_t position, float* row) {
  const Attention& a = self.attention;
  self.key_transform.load(self.key, token, head, a.head_dim, past_len, row);
  append_row(keys, head, position, row);
  read_block(self.value.data, self.value.dtype, token * self.value.token_stride + head * self.value.head_stride,
             a.value_dim, row);
  append_row(values, head, position, row);
}

void append(ThreadPool& pool, const SlotAttention& self, const KvBuffer& keys, const KvBuffer& values,
            int64_t past_len) {
  const Attention& a = self.attention;
  int64_t grain = 1 + 4096 / (a.head_dim + a.value_dim);
  pool.parallel_for(a.num_tokens * a.kv_num_heads, grain, [&](int64_t begin, int64_t end, int) {
    float* row = scratch<float, Memory>(kMostHeadDim);
    for (int64_t i = begin; i < end; ++i) {
      int64_t token = i / a.kv_num_heads, head = i % a.kv_num_heads;
      append_head(self, keys, values, past_len, token, head, past_len + token, row);
    }
  });
}

struct Slots {
  const KvBuffer &keys, &values;
  int64_t total;  // tokens held once the new ones are appended

  KeyValue view() const { return {rows_of(keys), rows_of(values), total}; }
};

Slots slots_of(const SlotAttention& self, const Sequence& sequence, int64_t num_new) {
  const Attention& a = self.attention;
  int64_t total = sequence.past_len + (self.appends ? num_new : 0);
  const KvBuffer& keys = slot_at(sequence, self.key_slot, a.kv_num_heads, a.head_dim, total);
  const KvBuffer& values = slot_at(sequence, self.value_slot, a.kv_num_heads, a.value_dim, total);
  if (keys.dtype != values.dtype) throw std::invalid_argument("genai.Attention: the slots of K and V differ in dtype");
  return {keys, values, total};
}

// Token r is the next one of the sequence rows[r].
void run_rows(const SlotAttention& self, ThreadPool& pool, const std::vector<std::shared_ptr<Sequence>>& rows) {
  const Attention& a = self.attention;
  if (static_cast<int64_t>(rows.size()) != a.num_tokens || a.bias.tensor) {
    throw std::invalid_argument("genai.Attention: " + std::to_string(rows.size()) + " sequences for " +
                                std::to_string(a.num_tokens) + " tokens" + (a.bias.tensor ? " and a bias" : ""));
  }
  for (const auto& row : rows) slots_of(self, *row, 1);  // refuse before anything is written
  pool.parallel_for(a.num_tokens * a.kv_num_heads, 1, [&](int64_t begin, int64_t end, int) {
    float* memory = scratch<float, Memory>(kMostHeadDim);
    for (int64_t i = begin; i < end; ++i) {
      int64_t token = i / a.kv_num_heads, head = i % a.kv_num_heads, position = rows[token]->past_len;
      Slots slots = slots_of(self, *rows[token], 1);
      if (self.appends) append_head(self, slots.keys, slots.values, position - token, token, head, position, memory);
      a.run_head(slots.view(), token, position, head);
    }
  });
}

void run(const SlotAttention& self, Context& context) {
  if (!context.state.rows.empty()) return run_rows(self, context.pool, context.state.rows);
  const Attention& a = self.attention;
  const Sequence& sequence = *context.state.now;
  auto [keys, values, total] = slots_of(self, sequence, a.num_tokens);
  if (a.bias.tensor && a.bias.num_keys != 1 && a.bias.num_keys < total) {
    throw std::invalid_argument("genai.Attention: the attention bias covers " + std::to_string(a.bias.num_keys) +
                                " keys, wanted " + std::to_string(total));
  }
  if (self.appends) append(context.pool, self, keys, values, sequence.past_len);
  a.run(context.pool, {rows_of(keys), rows_of(values), total}, sequence.past_len);
}

// Tokens in [1, T, width] or [1, heads, T, dim]; checks batch and rank.
int64_t tokens_in(const Tensor& tensor, const char* name) {
  size_t rank = tensor.shape.size();
  if ((rank != 3 && rank != 4) || tensor.shape[0] != 1) {
    refuse(std::string("`") + name + "` is " + describe(tensor) + ", wanted [1, T, heads * D] or [1, heads, T, D]");
  }
  want_float(tensor, name);
  return tensor.shape[rank - 2];
}

// D of [1, T, num_heads * D] or [1, num_heads, T, D].
int64_t head_dim_in(const Tensor& tensor, int64_t num_heads, const char* name) {
  bool fits = tensor.shape.size() == 4 ? tensor.shape[1] == num_heads : tensor.shape[2] % num_heads == 0;
  if (!fits)
    refuse(std::string("`") + name + "` is " + describe(tensor) + ", wanted " + std::to_string(num_heads) + " heads");
  return tensor.shape.size() == 4 ? tensor.shape[3] : tensor.shape[2] / num_heads;
}

void bind_packed(SlotAttention& self, const Tensor& packed) {
  Attention& a = self.attention;
  int64_t heads = a.num_heads + 2 * a.kv_num_heads;
  if (packed.shape.size() != 3) refuse("packed qkv is " + describe(packed) + ", wanted [1, T, (H + 2 H_kv) * D]");
  a.head_dim = a.value_dim = head_dim_in(packed, heads, "packed qkv");
  a.query = head_rows(packed, heads, a.head_dim);
  self.key = head_rows(packed, heads, a.head_dim, a.num_heads * a.head_dim);
  self.value = head_rows(packed, heads, a.head_dim, (a.num_heads + a.kv_num_heads) * a.head_dim);
}

void bind_separate(SlotAttention& self, const Tensor& query, const Tensor& key, const Tensor& value) {
  Attention& a = self.attention;
  a.head_dim = head_dim_in(query, a.num_heads, "query");
  a.query = head_rows(query, a.num_heads, a.head_dim);
  if (tokens_in(key, "key") != a.num_tokens || tokens_in(value, "value") != a.num_tokens) {
    refuse("query, key and value are " + describe(query) + ", " + describe(key) + ", " + describe(value) +
           ", wanted one T");
  }
  if (head_dim_in(key, a.kv_num_heads, "key") != a.head_dim)
    refuse("`key` is " + describe(key) + ", wanted head size " + std::to_string(a.head_dim));
  a.value_dim = head_dim_in(value, a.kv_num_heads, "value");
  self.key = head_rows(key, a.kv_num_heads, a.head_dim);
  self.value = head_rows(value, a.kv_num_heads, a.value_dim);
}

void bind_output(Attention& a, const Tensor& out) {
  if (tokens_in(out, "output") != a.num_tokens || head_dim_in(out, a.num_heads, "output") != a.value_dim) {
    refuse("`output` is " + describe(out) + ", wanted [1, " + std::to_string(a.num_tokens) + ", " +
           std::to_string(a.num_heads * a.value_dim) + "]");
  }
  a.output = head_rows(out, a.num_heads, a.value_dim);
}

void bind_rotary(const Args& args, RowTransform& transform, int64_t num_tokens, int64_t head_dim) {
  transform.cos = optional_input(args, 3);
  transform.sin = optional_input(args, 4);
  transform.position_ids = optional_input(args, 5);
  transform.interleaved = args.integer("rotary_interleaved", 0) != 0;
  const Tensor &cos = transform.cos, &sin = transform.sin, &ids = transform.position_ids;
  if (bool(cos) != bool(sin)) refuse("cos_cache and sin_cache come together");
  if (ids && ids.dtype != DType::i32) want_dtype(ids, DType::i64, "position_ids");
  if (ids && ids.size() != num_tokens)
    refuse("`position_ids` is " + describe(ids) + ", wanted " + std::to_string(num_tokens) + " elements");
  if (!cos) return;
  want_float(cos, "cos_cache");
  want_dtype(sin, cos.dtype, "sin_cache");
  want_shape(sin, cos.shape, "sin_cache");
  if (cos.shape.size() != 2 || 2 * cos.shape[1] > head_dim) {
    refuse("`cos_cache` is " + describe(cos) + ", wanted [positions, at most " + std::to_string(head_dim / 2) + "]");
  }
}

Tensor vector_input(const Args& args, size_t index, int64_t size, const char* name) {
  Tensor vector = optional_input(args, index);
  if (vector) want_float(vector, name);
  if (vector && vector.size() != size)
    refuse(std::string("`") + name + "` is " + describe(vector) + ", wanted " + std::to_string(size) + " elements");
  return vector;
}

Step make_attention(const Args& args) {
  SlotAttention self;
  Attention& a = self.attention;
  const Tensor& query = input(args, 0, "query");
  Tensor key = optional_input(args, 1), value = optional_input(args, 2);
  a.num_heads = args.integer("num_heads", 0);
  a.kv_num_heads = args.integer("kv_num_heads", a.num_heads);
  if (a.num_heads < 1 || a.kv_num_heads < 1 || a.num_heads % a.kv_num_heads) {
    refuse("num_heads is " + std::to_string(a.num_heads) + " and kv_num_heads " + std::to_string(a.kv_num_heads) +
           ", wanted a multiple");
  }
  if (bool(key) != bool(value)) refuse("key and value come together");
  a.num_tokens = tokens_in(query, "query");
  self.appends = key || !args.integer("reads_only", 0);
  if (key) {
    bind_separate(self, query, key, value);
  } else if (self.appends) {
    bind_packed(self, query);
  } else {
    a.head_dim = head_dim_in(query, a.num_heads, "query");
    a.value_dim = args.integer("value_head_size", a.head_dim);
    a.query = head_rows(query, a.num_heads, a.head_dim);
  }
  if (a.head_dim < 1 || a.value_dim < 1 || std::max(a.head_dim, a.value_dim) > kMostHeadDim) {
    refuse("head sizes " + std::to_string(a.head_dim) + ", " + std::to_string(a.value_dim) + ", wanted 1 to " +
           std::to_string(kMostHeadDim));
  }
  bind_output(a, output(args));
  bind_rotary(args, a.transform, a.num_tokens, a.head_dim);
  self.key_transform = a.transform;
  a.transform.norm = vector_input(args, 8, a.head_dim, "q_norm_weight");
  self.key_transform.norm = vector_input(args, 9, a.head_dim, "k_norm_weight");
  a.transform.epsilon = self.key_transform.epsilon = args.real("qk_norm_epsilon", 1e-6);
  a.bias = score_bias(optional_input(args, 6), 1, a.num_heads, a.num_tokens);
  a.sink = vector_input(args, 7, a.num_heads, "head_sink");
  a.smooth = args.integer("smooth_softmax", 0) == 1;
  double scale = args.real("scale", 0);
  a.scale =
      scale != 0 ? static_cast<float>(scale) : static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.head_dim)));
  a.softcap = static_cast<float>(args.real("softcap", 0));
  int64_t window = args.integer("local_window_size", -1);
  a.left = window > 0 ? window - 1 : -1;
  a.right = args.integer("is_causal", 1) ? 0 : -1;
  a.bias_before_softcap = args.integer("bias_before_softcap", 0) != 0;
  self.key_slot = args.integer("key_slot", -1);
  self.value_slot = args.integer("value_slot", -1);
  if (self.key_slot < 0 || self.value_slot < 0) refuse("attributes `key_slot` and `value_slot` are wanted");
  return [self](Context& context) { run(self, context); };
}

}  // namespace

GENAI_KERNEL("genai.Attention", make_attention);

}  // namespace genai::GENAI_ISA
