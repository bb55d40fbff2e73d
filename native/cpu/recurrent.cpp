// Layers with a recurrent state. A state may be updated in place: past and present can be the same memory.
#include <cmath>

#include "cpu/check.h"
#include "cpu/lanes.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

struct Memory;
struct OutputMemory;

// CausalConvWithState: y[c][t] = sum over taps of weight[c][tap] * (past ++ x)[c][t + tap], + bias, activation.
struct Conv {
  Tensor x, weight, bias, past, y, present;
  int64_t channels = 0, tokens = 0, taps = 0;
  bool silu = false;

  void channel(int64_t row, float* memory, float* out) const {
    int64_t c = row % channels, kept = taps - 1;
    float *full = memory, *kernel = memory + kept + tokens;
    std::fill(full, full + kept, 0.0f);
    if (past) read_block(past.data, past.dtype, row * kept, kept, full);
    read_block(x.data, x.dtype, row * tokens, tokens, full + kept);
    read_block(weight.data, weight.dtype, c * taps, taps, kernel);
    float shift = 0;
    if (bias) read_block(bias.data, bias.dtype, c, 1, &shift);
    std::fill(out, out + tokens, 0.0f);
    for (int64_t tap = 0; tap < taps; ++tap) {
      for (int64_t t = 0; t < tokens; ++t) out[t] += kernel[tap] * full[t + tap];
    }
    for (int64_t t = 0; bias && t < tokens; ++t) out[t] += shift;
    if (present) write_block(present.data, present.dtype, row * kept, kept, full + tokens);
  }

  // Rows [begin, end) of [B * C]; the activation takes as many as fit in one go, decode steps have one token a row.
  void run(int64_t begin, int64_t end) const {
    int64_t together = std::max<int64_t>(1, 512 / std::max<int64_t>(1, tokens));
    float* memory = scratch<float, Memory>(tokens + 2 * taps);
    float* out = scratch<float, OutputMemory>(together * tokens + 1);
    for (int64_t row = begin; row < end; row += together) {
      int64_t rows = std::min(together, end - row), n = rows * tokens;
      for (int64_t i = 0; i < rows; ++i) channel(row + i, memory, out + i * tokens);
      if (silu) map_lanes(out, out, n, [](const v16& v) { return v * sigmoid(v); });
      write_block(y.data, y.dtype, row * tokens, n, out);
    }
  }
};

Step make_conv(const Args& args) {
  Conv conv{
      input(args, 0, "input"), input(args, 1, "weight"), optional_input(args, 2), optional_input(args, 3), output(args),
      optional_output(args, 1)};
  if (conv.x.shape.size() != 3 || conv.weight.shape.size() != 3)
    refuse("input is " + describe(conv.x) + " and weight " + describe(conv.weight) +
           ", wanted [B, C, T] and [C, 1, k]");
  int64_t batch = conv.x.shape[0];
  conv.channels = conv.x.shape[1], conv.tokens = conv.x.shape[2], conv.taps = conv.weight.shape[2];
  want_float(conv.x, "input");
  want_float(conv.weight, "weight");
  want_shape(conv.weight, {conv.channels, 1, conv.taps}, "weight");
  if (conv.taps < 1) refuse("weight is " + describe(conv.weight) + ", wanted at least one tap");
  want_shape(conv.y, conv.x.shape, "output");
  want_float(conv.y, "output");
  if (conv.bias) want_shape(conv.bias, {conv.channels}, "bias"), want_float(conv.bias, "bias");
  Shape state{batch, conv.channels, conv.taps - 1};
  if (conv.past) want_shape(conv.past, state, "past_state"), want_float(conv.past, "past_state");
  if (conv.present) want_shape(conv.present, state, "present_state"), want_float(conv.present, "present_state");
  for (auto [name, usual] : {std::pair{"channels_last", 0}, {"dilation", 1}, {"ndim", 1}, {"state_window", 0}}) {
    if (args.integer(name, usual) != usual)
      refuse(std::string("attribute `") + name + "` has no kernel but for " + std::to_string(usual));
  }
  std::string activation = args.text("activation", "none");
  conv.silu = activation == "silu" || activation == "swish";
  if (!conv.silu && activation != "none")
    refuse("attribute `activation` is `" + activation + "`, wanted none, silu or swish");
  return [=](Context& context) {
    int64_t grain = 1 + 4096 / (1 + conv.tokens * conv.taps);
    context.pool.parallel_for(batch * conv.channels, grain,
                              [&](int64_t begin, int64_t end, int) { conv.run(begin, end); });
  };
}

// LinearAttention: for every token S = keep * S; S += k (rate * (v - S'k))'; out = S'q. Columns of S (dimensions of v)
// do not meet, so threads share them; the keys are always summed first to last.
struct Linear {
  Tensor q, k, v, past, decay, beta, y, present;
  int64_t batch = 0, tokens = 0, q_heads = 0, k_heads = 0, heads = 0, key_dim = 0, value_dim = 0;
  int64_t decay_width = 0, beta_width = 0;  // per token
  float scale = 1;
  bool gated = true, delta = true;

  static constexpr int64_t kColumns = 64;  // of one job: 128 keys of it are 32 kB
  int64_t blocks() const { return (value_dim + kColumns - 1) / kColumns; }

  // What a token brings to a head, as floats.
  struct Token {
    float *key, *query, *keep;  // [key_dim]; query [queries of the head][key_dim]
    float value[kColumns], rate;
  };

  void load_token(int64_t b, int64_t t, int64_t h, int64_t first, int64_t n, Token& token) const {
    int64_t row = b * tokens + t, shared = std::max<int64_t>(1, q_heads / heads);
    read_block(k.data, k.dtype, (row * k_heads + h * k_heads / heads) * key_dim, key_dim, token.key);
    int64_t query = q_heads >= heads ? h * shared : h * q_heads / heads;
    read_block(q.data, q.dtype, (row * q_heads + query) * key_dim, shared * key_dim, token.query);
    for (int64_t i = 0; i < shared * key_dim; ++i) token.query[i] *= scale;
    read_block(v.data, v.dtype, (row * heads + h) * value_dim + first, n, token.value);
    token.rate = 1;
    if (delta && beta) read_block(beta.data, beta.dtype, row * beta_width + (beta_width == 1 ? 0 : h), 1, &token.rate);
    if (!gated || !decay) return std::fill(token.keep, token.keep + key_dim, 1.0f);
    int64_t per_head = decay_width / heads;
    read_block(decay.data, decay.dtype, row * decay_width + h * per_head, per_head, token.keep);
    map_lanes(token.keep, token.keep, per_head, [](const v16& x) { return exponential(x); });
    if (per_head == 1) std::fill(token.keep + 1, token.keep + key_dim, token.keep[0]);
  }

  // One token on `columns` (whole vectors) of the state [key_dim][kColumns]; out [queries][kColumns].
  void advance(const Token& token, float* state, int64_t columns, float* out) const {
    int64_t shared = std::max<int64_t>(1, q_heads / heads);
    for (int64_t c = 0; c < columns; c += kLanes) {
      v16 seen = all(0);
      for (int64_t i = 0; i < key_dim; ++i) {
        v16 row = load(state + i * kColumns + c) * token.keep[i];
        store(state + i * kColumns + c, row);
        if (delta) seen = multiply_add(all(token.key[i]), row, seen);
      }
      v16 add = (load(token.value + c) - seen) * token.rate;
      for (int64_t i = 0; i < key_dim; ++i) {
        store(state + i * kColumns + c, multiply_add(all(token.key[i]), add, load(state + i * kColumns + c)));
      }
      for (int64_t s = 0; s < shared; ++s) {
        v16 sum = all(0);
        for (int64_t i = 0; i < key_dim; ++i) {
          sum = multiply_add(all(token.query[s * key_dim + i]), load(state + i * kColumns + c), sum);
        }
        store(out + s * kColumns + c, sum);
      }
    }
  }

  void run_job(int64_t job) const {
    int64_t first = job % blocks() * kColumns, n = std::min(kColumns, value_dim - first), head = job / blocks();
    int64_t b = head / heads, h = head % heads, shared = std::max<int64_t>(1, q_heads / heads);
    int64_t width = (key_dim + kLanes - 1) / kLanes * kLanes;
    float* state = scratch<float, Memory>(key_dim * kColumns + (2 + shared) * width + shared * kColumns);
    float* next = state + key_dim * kColumns;
    Token token{next, next + 2 * width, next + width, {}, 1};
    float* out = next + (2 + shared) * width;
    std::fill(state, state + key_dim * kColumns, 0.0f);
    int64_t base = head * key_dim * value_dim + first;
    for (int64_t i = 0; past && i < key_dim; ++i)
      read_block(past.data, past.dtype, base + i * value_dim, n, state + i * kColumns);
    for (int64_t t = 0; t < tokens; ++t) {
      load_token(b, t, h, first, n, token);
      advance(token, state, (n + kLanes - 1) / kLanes * kLanes, out);
      int64_t outputs = std::max(q_heads, heads), to = (b * tokens + t) * outputs + h * shared;
      for (int64_t s = 0; s < shared; ++s)
        write_block(y.data, y.dtype, (to + s) * value_dim + first, n, out + s * kColumns);
    }
    for (int64_t i = 0; present && i < key_dim; ++i) {
      write_block(present.data, present.dtype, base + i * value_dim, n, state + i * kColumns);
    }
  }
};

void check_linear(const Linear& l) {
  for (const Tensor* tensor : {&l.q, &l.k, &l.v, &l.y}) {
    if (tensor->shape.size() != 3) refuse("a tensor is " + describe(*tensor) + ", wanted [B, T, heads * D]");
    want_float(*tensor, "query, key, value or output");
  }
  if (l.q_heads < 1 || l.heads < 1 || (l.q_heads % l.heads && l.heads % l.q_heads)) {
    refuse("q_num_heads is " + std::to_string(l.q_heads) + " and kv_num_heads " + std::to_string(l.heads) +
           ", wanted a multiple");
  }
}

void bind_sizes(Linear& l) {
  l.batch = l.q.shape[0], l.tokens = l.q.shape[1];
  l.key_dim = l.q.shape[2] / l.q_heads, l.value_dim = l.v.shape[2] / l.heads;
  if (l.key_dim < 1 || l.value_dim < 1 || l.k.shape[2] % l.key_dim)
    refuse("query is " + describe(l.q) + ", key " + describe(l.k) + ", value " + describe(l.v));
  l.k_heads = l.k.shape[2] / l.key_dim;
  if (l.k_heads < 1 || l.heads % l.k_heads)
    refuse("key is " + describe(l.k) + ", wanted a divisor of " + std::to_string(l.heads) + " heads");
  want_shape(l.q, {l.batch, l.tokens, l.q_heads * l.key_dim}, "query");
  want_shape(l.k, {l.batch, l.tokens, l.k_heads * l.key_dim}, "key");
  want_shape(l.v, {l.batch, l.tokens, l.heads * l.value_dim}, "value");
  want_shape(l.y, {l.batch, l.tokens, std::max(l.q_heads, l.heads) * l.value_dim}, "output");
  Shape state{l.batch, l.heads, l.key_dim, l.value_dim};
  if (l.past) want_shape(l.past, state, "past_state"), want_float(l.past, "past_state");
  if (l.present) want_shape(l.present, state, "present_state"), want_float(l.present, "present_state");
}

// Numbers per token; wants one of two widths.
int64_t width_of(const Tensor& tensor, int64_t rows, int64_t one, int64_t other, const char* name) {
  if (!tensor) return 0;
  want_float(tensor, name);
  int64_t width = rows ? tensor.size() / rows : one;
  if (tensor.size() != rows * width || (width != one && width != other)) {
    refuse(std::string("`") + name + "` is " + describe(tensor) + ", wanted " + std::to_string(one) + " or " +
           std::to_string(other) + " values a token");
  }
  return width;
}

Step make_linear(const Args& args) {
  Linear l;
  l.q = input(args, 0, "query"), l.k = input(args, 1, "key"), l.v = input(args, 2, "value");
  l.past = optional_input(args, 3), l.decay = optional_input(args, 4), l.beta = optional_input(args, 5);
  l.y = output(args), l.present = optional_output(args, 1);
  l.q_heads = args.integer("q_num_heads", 0), l.heads = args.integer("kv_num_heads", 0);
  std::string rule = args.text("update_rule", "gated_delta");
  l.gated = rule == "gated" || rule == "gated_delta";
  l.delta = rule == "delta" || rule == "gated_delta";
  if (!l.gated && !l.delta && rule != "linear")
    refuse("attribute `update_rule` is `" + rule + "`, wanted linear, gated, delta or gated_delta");
  if (args.integer("state_window", 0)) refuse("attribute `state_window` has no kernel");
  check_linear(l);
  bind_sizes(l);
  l.decay_width = width_of(l.decay, l.batch * l.tokens, l.heads, l.heads * l.key_dim, "decay");
  l.beta_width = width_of(l.beta, l.batch * l.tokens, l.heads, 1, "beta");
  double scale = args.real("scale", 0);
  l.scale = static_cast<float>(scale != 0 ? scale : 1.0 / std::sqrt(static_cast<double>(l.key_dim)));
  return [=](Context& context) {
    int64_t grain = 1 + 4096 / (1 + l.tokens * l.key_dim * Linear::kColumns);
    context.pool.parallel_for(l.batch * l.heads * l.blocks(), grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t job = begin; job < end; ++job) l.run_job(job);
    });
  };
}

}  // namespace

GENAI_KERNEL("CausalConvWithState", make_conv);
GENAI_KERNEL("LinearAttention", make_linear);

}  // namespace genai::GENAI_ISA
