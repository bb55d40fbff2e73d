// One-operand elementwise kernels. Floats of 16 bits are computed in float and rounded once.
#include <cmath>

#include "cpu/check.h"
#include "cpu/lanes.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

constexpr int64_t kBlock = 512;

// run(x, y, n) over blocks of C.
template <class C, class Run>
Step blockwise(const Tensor& x, const Tensor& y, Run run) {
  return [=](Context& context) {
    context.pool.parallel_for(x.size(), 16 * kBlock, [&](int64_t begin, int64_t end, int) {
      alignas(64) C in[kBlock], result[kBlock];
      for (int64_t at = begin; at < end; at += kBlock) {
        int64_t n = std::min(kBlock, end - at);
        run(block_of(x, at, n, in), result, n);
        write_block(y.data, y.dtype, at, n, result);
      }
    });
  };
}

void check_same(const Args& args, size_t num_inputs) {
  const Tensor &x = input(args, 0, "X"), &y = output(args);
  if (args.in.size() > num_inputs) refuse("wanted at most " + std::to_string(num_inputs) + " inputs");
  want_shape(y, x.shape, "Y");
  want_dtype(y, x.dtype, "Y");
}

template <class F>
Step lanewise(const Args& args, F f) {
  check_same(args, 1);
  want_float(args.in[0], "X");
  return blockwise<float>(args.in[0], args.out[0], [f](const float* x, float* y, int64_t n) { map_lanes(x, y, n, f); });
}

template <class F>
v16 each(const v16& x, F f) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = f(lane);
  return load(lanes);
}

// Ops that also exist for doubles and integers.
template <class Op>
Step make_number(const Args& args) {
  check_same(args, 1);
  const Tensor &x = args.in[0], &y = args.out[0];
  auto run = [](const auto* from, auto* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = Op::of(from[i]);
  };
  if (is_float(x.dtype)) return blockwise<float>(x, y, run);
  if (x.dtype == DType::f64) return blockwise<double>(x, y, run);
  if (x.dtype == DType::u64) refuse("uint64 has no kernel");
  return blockwise<int64_t>(x, y, run);
}

struct Neg {
  template <class C>
  static C of(C x) {
    if constexpr (std::is_integral_v<C>) return static_cast<C>(-static_cast<uint64_t>(x));
    return -x;
  }
};
struct Abs {
  template <class C>
  static C of(C x) {
    if constexpr (std::is_integral_v<C>) return x < 0 ? Neg::of(x) : x;
    return std::fabs(x);
  }
};
struct Relu {
  template <class C>
  static C of(C x) {
    return x < C(0) ? C(0) : x;
  }
};
struct Sign {
  template <class C>
  static C of(C x) {
    return x > C(0) ? C(1) : x < C(0) ? C(-1) : x;
  }
};

Step make_not(const Args& args) {
  check_same(args, 1);
  want_dtype(args.in[0], DType::boolean, "X");
  return blockwise<int64_t>(args.in[0], args.out[0], [](const int64_t* x, int64_t* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = !x[i];
  });
}

// Limits are read when the step runs: they may be computed values.
template <class C>
Step clip_step(const Args& args) {
  Tensor x = args.in[0], y = args.out[0], low = optional_input(args, 1), high = optional_input(args, 2);
  double low_attr = args.real("min", -INFINITY), high_attr = args.real("max", INFINITY);
  return [=](Context& context) {
    C least = std::numeric_limits<C>::lowest(), most = std::numeric_limits<C>::max();
    if constexpr (std::is_floating_point_v<C>) least = static_cast<C>(low_attr), most = static_cast<C>(high_attr);
    if (low) read_block(low.data, low.dtype, 0, 1, &least);
    if (high) read_block(high.data, high.dtype, 0, 1, &most);
    blockwise<C>(x, y, [=](const C* from, C* to, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        C raised = from[i] < least ? least : from[i];
        to[i] = raised > most ? most : raised;
      }
    })(context);
  };
}

Step make_clip(const Args& args) {
  check_same(args, 3);
  for (size_t i : {1, 2}) {
    Tensor limit = optional_input(args, i);
    if (!limit) continue;
    if (limit.size() != 1) refuse("a limit is " + describe(limit) + ", wanted one element");
    want_dtype(limit, args.in[0].dtype, "min/max");
  }
  if (is_float(args.in[0].dtype)) return clip_step<float>(args);
  if (args.in[0].dtype == DType::f64) return clip_step<double>(args);
  if (args.in[0].dtype == DType::u64) refuse("uint64 has no kernel");
  return clip_step<int64_t>(args);
}

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), inside in double.
v16 gelu_tanh(const v16& x) {
  return through_double(x, [](const d8& value) {
    d8 inner = 0.7978845608028654 * (value + 0.044715 * value * value * value);
    return 0.5 * value * (1.0 + hyperbolic_tangent(inner));
  });
}

v16 gelu_erf(const v16& x) {
  return each(x, [](float value) {
    double exact = value;
    return static_cast<float>(0.5 * exact * (1.0 + std::erf(exact * 0.7071067811865476)));
  });
}

Step make_gelu(const Args& args) {
  std::string approximate = args.text("approximate", "none");
  if (approximate == "tanh") return lanewise(args, gelu_tanh);
  if (approximate != "none") refuse("attribute `approximate` is `" + approximate + "`, wanted `none` or `tanh`");
  return lanewise(args, gelu_erf);
}

// x [..., E] + bias [E], then f.
template <class F>
Step biased(const Args& args, F f) {
  Tensor x = input(args, 0, "X"), y = output(args), bias = optional_input(args, 1);
  if (!bias) return lanewise({{x}, {y}, {}}, f);
  want_float(x, "X");
  want_shape(y, x.shape, "Y");
  want_dtype(y, x.dtype, "Y");
  want_dtype(bias, x.dtype, "bias");
  if (x.shape.empty()) refuse("`X` is a scalar, wanted at least one dimension");
  int64_t width = x.shape.back();
  want_shape(bias, {width}, "bias");
  return [=](Context& context) {
    context.pool.parallel_for(x.size(), 16 * kBlock, [&](int64_t begin, int64_t end, int) {
      alignas(64) float in[kBlock], add[kBlock], result[kBlock];
      for (int64_t at = begin, n; at < end; at += n) {
        n = std::min({kBlock, end - at, width - at % width});
        const float *value = block_of(x, at, n, in), *shift = block_of(bias, at % width, n, add);
        for (int64_t i = 0; i < n; ++i) result[i] = value[i] + shift[i];
        map_lanes(result, result, n, f);
        write_block(y.data, y.dtype, at, n, result);
      }
    });
  };
}

Step make_fast_gelu(const Args& args) { return biased(args, gelu_tanh); }
Step make_bias_gelu(const Args& args) {
  input(args, 1, "bias");
  return biased(args, gelu_erf);
}

Step make_quick_gelu(const Args& args) {
  float alpha = static_cast<float>(args.real("alpha", 1.702));
  return lanewise(args, [alpha](v16 x) { return x * sigmoid(x * alpha); });
}

Step make_swish(const Args& args) {
  float alpha = static_cast<float>(args.real("alpha", 1.0));
  return lanewise(args, [alpha](v16 x) { return x * sigmoid(x * alpha); });
}

Step make_sigmoid(const Args& args) {
  return lanewise(args, [](v16 x) { return sigmoid(x); });
}
Step make_tanh(const Args& args) {
  return lanewise(args, [](v16 x) { return hyperbolic_tangent(x); });
}
Step make_exp(const Args& args) {
  return lanewise(args, [](v16 x) { return exponential(x); });
}
Step make_sqrt(const Args& args) {
  return lanewise(args, [](v16 x) { return each(x, [](float v) { return std::sqrt(v); }); });
}
Step make_reciprocal(const Args& args) {
  return lanewise(args, [](v16 x) { return 1.0f / x; });
}

// Rare ones: libm, element by element, in double so that the result is the nearest float.
template <double (*function)(double)>
Step make_libm(const Args& args) {
  return lanewise(args, [](v16 x) { return each(x, [](float v) { return static_cast<float>(function(v)); }); });
}

double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

}  // namespace

GENAI_KERNEL("Neg", make_number<Neg>);
GENAI_KERNEL("Abs", make_number<Abs>);
GENAI_KERNEL("Relu", make_number<Relu>);
GENAI_KERNEL("Sign", make_number<Sign>);
GENAI_KERNEL("Not", make_not);
GENAI_KERNEL("Clip", make_clip);
GENAI_KERNEL("Sigmoid", make_sigmoid);
GENAI_KERNEL("Tanh", make_tanh);
GENAI_KERNEL("Exp", make_exp);
GENAI_KERNEL("Sqrt", make_sqrt);
GENAI_KERNEL("Reciprocal", make_reciprocal);
GENAI_KERNEL("Log", make_libm<std::log>);
GENAI_KERNEL("Erf", make_libm<std::erf>);
GENAI_KERNEL("Sin", make_libm<std::sin>);
GENAI_KERNEL("Cos", make_libm<std::cos>);
GENAI_KERNEL("Softplus", make_libm<softplus>);
GENAI_KERNEL("Gelu", make_gelu);
GENAI_KERNEL("FastGelu", make_fast_gelu);
GENAI_KERNEL("BiasGelu", make_bias_gelu);
GENAI_KERNEL("QuickGelu", make_quick_gelu);
GENAI_KERNEL("Swish", make_swish);

}  // namespace genai::GENAI_ISA
