// ai.onnx Attention without a KV cache: everything to attend to is in K and V.
#include <cmath>

#include "cpu/attention.h"
#include "cpu/convert.h"

namespace genai::GENAI_ISA {
namespace {

struct Side {
  Tensor tensor;
  int64_t heads = 0, tokens = 0, dim = 0;

  // [B, heads, T, D], or [B, T, heads * D] with the number of heads from an attribute.
  Side(const Tensor& t, int64_t num_heads, const char* name) : tensor(t) {
    want_float(t, name);
    if (t.shape.size() == 4) {
      heads = t.shape[1], tokens = t.shape[2], dim = t.shape[3];
    } else if (t.shape.size() == 3 && num_heads > 0 && t.shape[2] % num_heads == 0) {
      heads = num_heads, tokens = t.shape[1], dim = t.shape[2] / num_heads;
    } else {
      refuse(std::string("`") + name + "` is " + describe(t) +
             ", wanted [B, H, T, D], or [B, T, H * D] and the number of heads");
    }
  }

  HeadRows rows(int64_t batch) const {
    HeadRows made = head_rows(tensor, heads, dim);
    made.data = static_cast<char*>(made.data) + batch * heads * tokens * dim * size_of(tensor.dtype);
    return made;
  }
};

// Keys that hold something, per sequence of the batch; without the input all do.
int64_t valid_keys(const Tensor& lengths, int64_t batch, int64_t most) {
  if (!lengths) return most;
  int64_t length = integer_at(lengths, batch);
  if (length < 0 || length > most)
    throw std::out_of_range("Attention: nonpad_kv_seqlen " + std::to_string(length) + " is outside " +
                            std::to_string(most));
  return length;
}

Step make_dense(const Args& args) {
  int64_t q_heads = args.integer("q_num_heads", args.integer("num_heads", 0));
  Side q(input(args, 0, "Q"), q_heads, "Q"), k(input(args, 1, "K"), args.integer("kv_num_heads", q_heads), "K");
  Side v(input(args, 2, "V"), args.integer("kv_num_heads", q_heads), "V"), y(output(args), q_heads, "Y");
  if (optional_input(args, 4) || optional_input(args, 5)) refuse("past_key and past_value have no kernel here");
  for (size_t i = 1; i < args.out.size(); ++i) {
    if (args.out[i]) refuse("outputs beside Y have no kernel");
  }
  int64_t batch = q.tensor.shape[0];
  bool fits = k.tensor.shape[0] == batch && v.tensor.shape[0] == batch && y.tensor.shape[0] == batch &&
              k.heads == v.heads && k.tokens == v.tokens && k.dim == q.dim && k.heads > 0 && q.heads % k.heads == 0 &&
              k.tensor.dtype == v.tensor.dtype;
  if (!fits || y.heads != q.heads || y.tokens != q.tokens || y.dim != v.dim) {
    refuse("Q, K, V, Y are " + describe(q.tensor) + ", " + describe(k.tensor) + ", " + describe(v.tensor) + ", " +
           describe(y.tensor) + ": they do not fit together");
  }
  Attention a;
  a.num_tokens = q.tokens, a.num_heads = q.heads, a.kv_num_heads = k.heads, a.head_dim = q.dim, a.value_dim = v.dim;
  double scale = args.real("scale", 0);
  a.scale = static_cast<float>(scale != 0 ? scale : 1.0 / std::sqrt(static_cast<double>(q.dim)));
  a.softcap = static_cast<float>(args.real("softcap", 0));
  a.left = args.integer("left_window_size", -1);
  a.right = args.integer("is_causal", 0) ? 0 : args.integer("right_window_size", -1);
  a.bias_before_softcap = args.integer("bias_before_softcap", 0) != 0;
  a.bias = score_bias(optional_input(args, 3), batch, q.heads, q.tokens);
  if (a.bias.tensor && a.bias.num_keys != 1 && a.bias.num_keys < k.tokens) {
    refuse("attn_mask is " + describe(a.bias.tensor) + ", wanted " + std::to_string(k.tokens) + " keys");
  }
  Tensor lengths = optional_input(args, 6);
  if (lengths && lengths.dtype != DType::i32) want_dtype(lengths, DType::i64, "nonpad_kv_seqlen");
  if (lengths) want_shape(lengths, {batch}, "nonpad_kv_seqlen");
  return [=](Context& context) {
    for (int64_t b = 0; b < batch; ++b) {
      Attention one = a;
      one.query = q.rows(b);
      one.output = y.rows(b);
      if (one.bias.tensor) {
        one.bias.tensor.data =
            static_cast<char*>(a.bias.tensor.data) + b * a.bias.batch_stride * size_of(a.bias.tensor.dtype);
      }
      int64_t keys = valid_keys(lengths, b, k.tokens);
      // With lengths the last query stands at the last key; without, the first at the first.
      one.run(context.pool, {k.rows(b), v.rows(b), keys}, lengths ? keys - q.tokens : 0);
    }
  };
}

}  // namespace

GENAI_KERNEL("Attention", make_dense);
GENAI_KERNEL("genai.AttentionDense", make_dense);

}  // namespace genai::GENAI_ISA
