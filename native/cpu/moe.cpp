// com.microsoft MoE and QMoE: rows go to the k experts their router likes best, and what comes back is mixed.
//
// A slot is a (row, chosen expert) pair. Slots are sorted by expert, so that an expert's weights are read once for all
// its rows. Between the projections everything is f32. A slot's sums are those of one row of a product, and a row adds
// up its slots in the order of the router's choice: its bits depend neither on other rows nor on threads.
#include <algorithm>
#include <cmath>

#include "cpu/lanes.h"
#include "cpu/matmul.h"
#include "cpu/nbits.h"
#include "cpu/scratch.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

constexpr int64_t kWorth = 16 * 1024;  // elements worth a thread

struct RowsTag;
struct HiddenTag;
struct OtherTag;
struct GatedTag;
struct SlotsTag;
struct RouterTag;

// -- which experts ----------------------------------------------------------------------------------------------------

struct Router {
  Tensor logits, weights;  // [rows, experts]; separate weights mix what the logits select
  int64_t num_experts = 0, k = 1;
  bool normalize = false;  // the mixing weights of a row sum to 1

  void route(int64_t row, int32_t* chosen, float* mix) const;
};

// The k largest, largest first; of equal ones the lower index. Where nothing compares (NaN) the first ones left.
void largest(const float* values, int64_t count, int64_t k, int32_t* chosen) {
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; ++e) {
      if (std::find(chosen, chosen + i, e) != chosen + i) continue;
      if (best < 0 || values[e] > values[best]) best = e;
    }
    chosen[i] = static_cast<int32_t>(best);
  }
}

void Router::route(int64_t row, int32_t* chosen, float* mix) const {
  float* values = scratch<float, RouterTag>(num_experts);
  read_block(logits.data, logits.dtype, row * num_experts, num_experts, values);
  largest(values, num_experts, k, chosen);
  if (weights) {
    for (int64_t i = 0; i < k; ++i) read_block(weights.data, weights.dtype, row * num_experts + chosen[i], 1, mix + i);
  } else {
    float top = values[chosen[0]], total = 0;
    for (int64_t e = 0; e < num_experts; ++e) total += values[e] = std::exp(values[e] - top);
    for (int64_t i = 0; i < k; ++i) mix[i] = values[chosen[i]] / total;
  }
  if (!normalize) return;
  float sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += mix[i];
  for (int64_t i = 0; i < k && sum != 0; ++i) mix[i] /= sum;
}

// -- one expert's projection ------------------------------------------------------------------------------------------

struct Projection {
  int64_t n = 0, k = 0;
  Tensor weights, bias;                                      // [E, N, K]; [E, N]
  std::vector<std::shared_ptr<const PackedWeights>> packed;  // one an expert, where they are quantized
  std::shared_ptr<std::vector<float>> zeros;                 // of whole rows; what `packed` was made from
  bool int8 = false;                                         // activations rounded block by block

  explicit operator bool() const { return n > 0; }
  void run(ThreadPool& pool, int64_t expert, const float* rows, int64_t num_rows, float* y) const;
};

void Projection::run(ThreadPool& pool, int64_t expert, const float* rows, int64_t num_rows, float* y) const {
  if (packed.empty()) {
    const char* own = static_cast<const char*>(weights.data) + expert * n * k * size_of(weights.dtype);
    multiply_rows(pool, rows, num_rows, k, own, weights.dtype, n, y);
  } else {
    multiply_rows(pool, packed[expert], rows, num_rows, int8, y);
  }
  if (!bias) return;
  pool.parallel_for(num_rows, 1 + kWorth / n, [&](int64_t begin, int64_t end, int) {
    constexpr int64_t kBlock = 256;
    float more[kBlock];
    for (int64_t first = 0; first < n; first += kBlock) {
      int64_t count = std::min(kBlock, n - first);
      read_block(bias.data, bias.dtype, expert * n + first, count, more);
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t i = 0; i < count; ++i) y[row * n + first + i] += more[i];
      }
    }
  });
}

// -- what stands between the projections ------------------------------------------------------------------------------

struct Activation {
  std::string type;
  int64_t fusion = 0;  // of swiglu: 1 gate and linear in turn, 2 side by side, 0 linear apart if there is another
  float alpha = 1, beta = 0, limit = INFINITY;

  bool gated() const { return type == "swiglu"; }
  void run(const float* hidden, const float* other, int64_t width, float* y) const;

 private:
  void swiglu(const float* gate, const float* linear, int64_t stride, int64_t width, float* y) const;
};

void Activation::swiglu(const float* gate, const float* linear, int64_t stride, int64_t width, float* y) const {
  constexpr int64_t kBlock = 256;
  float sigmoids[kBlock];
  for (int64_t first = 0; first < width; first += kBlock) {
    int64_t count = std::min(kBlock, width - first);
    const float *own = gate + first * stride, *more = linear + first * stride;
    for (int64_t i = 0; i < count; ++i) sigmoids[i] = alpha * std::min(own[i * stride], limit);
    map_lanes(sigmoids, sigmoids, count, [](v16 x) { return sigmoid(x); });
    for (int64_t i = 0; i < count; ++i) {
      float up = std::min(std::max(more[i * stride], -limit), limit);
      y[first + i] = std::min(own[i * stride], limit) * sigmoids[i] * (up + beta);
    }
  }
}

// One row: `hidden`, and `other` where there is a third projection, to `width` values.
void Activation::run(const float* hidden, const float* other, int64_t width, float* y) const {
  if (gated()) {
    if (fusion == 1) return swiglu(hidden, hidden + 1, 2, width, y);
    return swiglu(hidden, fusion == 2 || !other ? hidden + width : other, 1, width, y);
  }
  if (type == "silu") {
    map_lanes(hidden, y, width, [](v16 x) { return x * sigmoid(x); });
  } else if (type == "gelu") {
    for (int64_t i = 0; i < width; ++i) {
      double x = hidden[i];
      y[i] = static_cast<float>(0.5 * x * (1 + std::erf(x * 0.7071067811865476)));
    }
  } else if (type == "relu") {
    for (int64_t i = 0; i < width; ++i) y[i] = hidden[i] < 0 ? 0 : hidden[i];  // NaN stays
  } else {
    std::copy_n(hidden, width, y);
  }
  for (int64_t i = 0; other && i < width; ++i) y[i] *= other[i];
}

// -- the mixture ------------------------------------------------------------------------------------------------------

struct Mixture {
  Tensor x, y;
  int64_t num_rows = 0, hidden = 0;
  Router router;
  Activation activation;
  Projection fc1, fc2, fc3;

  void run(ThreadPool& pool) const;

 private:
  void run_expert(ThreadPool& pool, int64_t expert, const int32_t* rows, int64_t count, float* out) const;
};

// Rows of x, as listed, through one expert; out [count, hidden].
void Mixture::run_expert(ThreadPool& pool, int64_t expert, const int32_t* rows, int64_t count, float* out) const {
  float* in = scratch<float, RowsTag>(count * hidden);
  for (int64_t i = 0; i < count; ++i) read_block(x.data, x.dtype, rows[i] * hidden, hidden, in + i * hidden);
  float* first = scratch<float, HiddenTag>(count * fc1.n);
  float* other = fc3 ? scratch<float, OtherTag>(count * fc3.n) : nullptr;
  float* between = scratch<float, GatedTag>(count * fc2.k);
  fc1.run(pool, expert, in, count, first);
  if (fc3) fc3.run(pool, expert, in, count, other);
  pool.parallel_for(count, 1 + kWorth / 4 / fc2.k, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      activation.run(first + i * fc1.n, other ? other + i * fc3.n : nullptr, fc2.k, between + i * fc2.k);
    }
  });
  fc2.run(pool, expert, between, count, out);
}

void Mixture::run(ThreadPool& pool) const {
  int64_t k = router.k, slots = num_rows * k;
  std::vector<int32_t> chosen(slots), rows(slots), place(slots);
  std::vector<int64_t> start(router.num_experts + 1, 0);
  std::vector<float> mix(slots);
  pool.parallel_for(num_rows, 1 + kWorth / (router.num_experts * k), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) router.route(row, &chosen[row * k], &mix[row * k]);
  });
  for (int32_t expert : chosen) ++start[expert + 1];
  for (int64_t e = 0; e < router.num_experts; ++e) start[e + 1] += start[e];
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t slot = 0; slot < slots; ++slot) {
    place[slot] = static_cast<int32_t>(next[chosen[slot]]++);
    rows[place[slot]] = static_cast<int32_t>(slot / k);
  }
  float* made = scratch<float, SlotsTag>(slots * hidden);
  for (int64_t e = 0; e < router.num_experts; ++e) {
    int64_t count = start[e + 1] - start[e];
    if (count) run_expert(pool, e, &rows[start[e]], count, made + start[e] * hidden);
  }
  pool.parallel_for(num_rows, 1 + kWorth / (hidden * k), [&](int64_t begin, int64_t end, int) {
    float* sums = scratch<float, RowsTag>(hidden);
    for (int64_t row = begin; row < end; ++row) {
      std::fill_n(sums, hidden, 0.0f);
      for (int64_t slot = row * k; slot < (row + 1) * k; ++slot) {
        const float* from = made + place[slot] * hidden;
        for (int64_t i = 0; i < hidden; ++i) sums[i] += mix[slot] * from[i];
      }
      write_block(y.data, y.dtype, row * hidden, hidden, sums);
    }
  });
}

// -- factories --------------------------------------------------------------------------------------------------------

Projection projection(const Args& args, size_t weights, size_t bias, int64_t bits, const char* name) {
  Projection made;
  made.weights = optional_input(args, weights);
  if (!made.weights) return made;
  if (made.weights.shape.size() != 3)
    refuse(std::string(name) + " are " + describe(made.weights) + ", wanted [E, N, K]");
  made.n = made.weights.shape[1];
  made.k = made.weights.shape[2] * (bits ? 8 / bits : 1);
  made.bias = optional_input(args, bias);
  if (made.n < 1 || made.k < 1) refuse(std::string(name) + " are " + describe(made.weights) + ", which is empty");
  if (made.bias) want_float(made.bias, "bias");
  if (made.bias) want_shape(made.bias, {made.weights.shape[0], made.n}, "bias");
  return made;
}

void check_projection(const Mixture& m, const Projection& p, int64_t n, int64_t k, const char* name) {
  if (!p || (p.weights.shape[0] == m.router.num_experts && p.n == n && p.k == k)) return;
  refuse(std::string(name) + " are " + describe(p.weights) + ", wanted " + std::to_string(m.router.num_experts) +
         " experts of " + std::to_string(n) + " times " + std::to_string(k));
}

Activation activation_of(const Args& args) {
  Activation made;
  made.type = args.text("activation_type", "relu");
  made.fusion = args.integer("swiglu_fusion", 0);
  made.alpha = static_cast<float>(args.real("activation_alpha", 1.0));
  made.beta = static_cast<float>(args.real("activation_beta", 0.0));
  made.limit = static_cast<float>(args.real("swiglu_limit", INFINITY));
  for (const char* known : {"relu", "gelu", "silu", "identity", "swiglu"}) {
    if (made.type == known) return made;
  }
  refuse("activation_type is `" + made.type + "`, wanted relu, gelu, silu, identity or swiglu");
}

// Everything but the projections, which the caller has made.
Step finish(const Args& args, Mixture m, bool normalize, const Tensor& router_weights) {
  m.x = input(args, 0, "input");
  m.y = output(args);
  m.router.logits = input(args, 1, "router_probs");
  m.router.weights = router_weights;
  m.router.normalize = normalize;
  m.router.k = args.integer("k", 1);
  m.activation = activation_of(args);
  if (args.integer("use_sparse_mixer", 0)) refuse("use_sparse_mixer has no kernel");
  if (!m.fc1 || !m.fc2) refuse("fc1 and fc2 weights are wanted");
  want_float(m.x, "input");
  want_float(m.y, "output");
  want_float(m.router.logits, "router_probs");
  want_shape(m.y, m.x.shape, "output");
  if (m.x.shape.empty() || m.x.shape.back() < 1) refuse("`input` is " + describe(m.x) + ", wanted rows");
  m.hidden = m.x.shape.back();
  m.num_rows = m.x.size() / m.hidden;
  m.router.num_experts = m.fc1.weights.shape[0];
  if (m.router.k < 1 || m.router.k > m.router.num_experts) {
    refuse("k is " + std::to_string(m.router.k) + ", wanted 1 to " + std::to_string(m.router.num_experts));
  }
  for (const Tensor* table : {&m.router.logits, &m.router.weights}) {
    if (*table && table->size() != m.num_rows * m.router.num_experts)
      refuse("`router_probs` or weights are " + describe(*table) + ", wanted a value for every row and expert");
  }
  if (m.router.weights) want_float(m.router.weights, "router_weights");
  bool halves = m.activation.gated() && (m.activation.fusion || !m.fc3);
  check_projection(m, m.fc1, halves ? 2 * m.fc2.k : m.fc2.k, m.hidden, "fc1 weights");
  check_projection(m, m.fc2, m.hidden, m.fc2.k, "fc2 weights");
  check_projection(m, m.fc3, m.fc2.k, m.hidden, "fc3 weights");
  return [m = std::move(m)](Context& context) { m.run(context.pool); };
}

Step make_moe(const Args& args) {
  Mixture m;
  m.fc1 = projection(args, 2, 3, 0, "fc1 weights");
  m.fc2 = projection(args, 4, 5, 0, "fc2 weights");
  m.fc3 = projection(args, 6, 7, 0, "fc3 weights");
  for (const Projection* one : {&m.fc1, &m.fc2, &m.fc3}) {
    if (*one) want_float(one->weights, "weights");
  }
  return finish(args, std::move(m), args.integer("normalize_routing_weights", 0), {});
}

// Expert e's part of a tensor [E, ...].
Tensor part_of(const Tensor& all, int64_t expert, int64_t num_experts) {
  if (!all) return all;
  Tensor part = all;
  part.shape = {all.size() / num_experts};
  part.data = static_cast<char*>(all.data) + expert * part.shape[0] * size_of(all.dtype);
  return part;
}

// Where a row is one block its zero points are packed along the rows: a float each.
Tensor row_zeros(Projection& p, const Tensor& zeros, int64_t bits, int64_t num_experts) {
  int64_t lanes = 8 / bits, bytes = (p.n + lanes - 1) / lanes;
  const uint8_t* from = static_cast<const uint8_t*>(zeros.data);
  p.zeros = std::make_shared<std::vector<float>>(num_experts * p.n);
  for (int64_t i = 0; i < num_experts * p.n; ++i) {
    int64_t row = i % p.n;
    int value = from[i / p.n * bytes + row / lanes] >> (row % lanes * bits);
    (*p.zeros)[i] = static_cast<float>(value & ((1 << bits) - 1));
  }
  return {p.zeros->data(), DType::f32, {num_experts, p.n}};
}

// Inputs from `first` on: weights, scales, bias.
Projection quantized(const Args& args, size_t first, size_t zero_points, const std::string& name) {
  int64_t bits = args.integer(name + "_expert_weight_bits", 0), block = args.integer("block_size", 0);
  if (!bits) bits = args.integer("expert_weight_bits", 4);
  if (bits != 4 && bits != 8) refuse(name + " has " + std::to_string(bits) + " bits, wanted 4 or 8");
  Projection made = projection(args, first, first + 2, bits, name.c_str());
  if (!made) return made;
  bool whole = block == 0;
  if (whole) block = made.k;
  if (block < 16 || block % 16 || made.k % block) {
    refuse(name + " has blocks of " + std::to_string(block) + " of " + std::to_string(made.k) +
           " columns, wanted a divisor and a multiple of 16");
  }
  int64_t num_experts = made.weights.shape[0], blocks = made.k / block, lanes = 8 / bits;
  Tensor scales = input(args, first + 1, "scales"), zeros = optional_input(args, zero_points);
  want_dtype(made.weights, DType::u8, "weights");
  want_float(scales, "scales");
  if (scales.size() != num_experts * made.n * blocks) {
    refuse(name + " scales are " + describe(scales) + ", wanted " + describe(Shape{num_experts, made.n, blocks}));
  }
  if (zeros) {
    int64_t bytes = whole ? (made.n + lanes - 1) / lanes : made.n * ((blocks + lanes - 1) / lanes);
    want_dtype(zeros, DType::u8, "zero_points");
    if (zeros.size() != num_experts * bytes)
      refuse(name + " zero points are " + describe(zeros) + ", wanted " + std::to_string(num_experts * bytes));
  }
  if (zeros && whole) zeros = row_zeros(made, zeros, bits, num_experts);
  made.int8 = !whole && (args.integer("accuracy_level", 0) == 4 || bits == 8);
  for (int64_t e = 0; e < num_experts; ++e) {
    made.packed.push_back(packed(part_of(made.weights, e, num_experts), part_of(scales, e, num_experts),
                                 part_of(zeros, e, num_experts), made.n, made.k, bits, block));
  }
  return made;
}

Step make_qmoe(const Args& args) {
  if (args.text("quant_type", "int") != "int") refuse("only quant_type `int` has a kernel");
  if (args.integer("weights_prepacked", -1) > 0) refuse("prepacked weights hold another device's layout");
  Mixture m;
  m.fc1 = quantized(args, 2, 11, "fc1");
  m.fc2 = quantized(args, 5, 12, "fc2");
  m.fc3 = quantized(args, 8, 13, "fc3");
  Tensor weights = optional_input(args, 14);
  // Without weights of their own the chosen ones always sum to 1, as ONNX Runtime has it.
  return finish(args, std::move(m), !weights || args.integer("normalize_routing_weights", 0), weights);
}

}  // namespace

GENAI_KERNEL("MoE", make_moe);
GENAI_KERNEL("QMoE", make_qmoe);

}  // namespace genai::GENAI_ISA
