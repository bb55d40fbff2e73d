// Two-operand elementwise kernels with numpy broadcasting: arithmetic, comparisons, logic.
#include <cmath>

#include "cpu/broadcast.h"
#include "cpu/convert.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

constexpr int64_t kBlock = 512;  // elements converted at a time: two inputs and the output stay in L1

template <class C>
using Apply = void (*)(const C*, const C*, C*, int64_t);

// A stride of 0 repeats one element.
template <class C>
const C* operand(const Tensor& tensor, int64_t offset, int64_t stride, int64_t n, C* buffer) {
  if (stride == 1 || n == 1) return block_of(tensor, offset, n, buffer);
  read_block(tensor.data, tensor.dtype, offset, 1, buffer);
  std::fill(buffer + 1, buffer + n, buffer[0]);
  return buffer;
}

template <class C>
Step binary_step(const Args& args, Apply<C> apply) {
  Tensor a = input(args, 0, "A"), b = input(args, 1, "B"), out = output(args);
  auto walk = make_walk<2>(out.shape, {a.shape, b.shape});
  return [=](Context& context) {
    context.pool.parallel_for(walk.size, 16 * kBlock, [&](int64_t begin, int64_t end, int) {
      alignas(64) C left[kBlock], right[kBlock], result[kBlock];
      walk_runs(walk, begin, end, kBlock, [&](int64_t at, const std::array<int64_t, 2>& offsets, int64_t n) {
        const C* x = operand(a, offsets[0], walk.strides[0].back(), n, left);
        const C* y = operand(b, offsets[1], walk.strides[1].back(), n, right);
        apply(x, y, result, n);
        write_block(out.data, out.dtype, at, n, result);
      });
    });
  };
}

template <class C, class Op>
void apply_op(const C* a, const C* b, C* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Op::template of<C>(a[i], b[i]);
}

template <class Op>
Step make_binary(const Args& args) {
  const Tensor &a = input(args, 0, "A"), &b = input(args, 1, "B"), &out = output(args);
  if (args.in.size() != 2) refuse("wanted 2 inputs, found " + std::to_string(args.in.size()));
  bool power = Op::mixed && is_float(a.dtype);  // Pow's exponent may have a type of its own
  if (a.dtype != b.dtype && !power) refuse("A is " + describe(a) + " and B is " + describe(b) + ", wanted one dtype");
  if (Op::to_bool) want_dtype(out, DType::boolean, "C");
  if (!Op::to_bool && out.dtype != a.dtype) want_dtype(out, a.dtype, "C");
  if (a.dtype == DType::u64) refuse("uint64 has no kernel");
  if (is_float(a.dtype)) return binary_step<float>(args, apply_op<float, Op>);
  if (a.dtype == DType::f64) return binary_step<double>(args, apply_op<double, Op>);
  return binary_step<int64_t>(args, apply_op<int64_t, Op>);
}

struct Arithmetic {
  static constexpr bool to_bool = false, mixed = false;
};
struct Comparison {
  static constexpr bool to_bool = true, mixed = false;
};

struct Add : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    if constexpr (std::is_integral_v<C>) return static_cast<C>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    return a + b;
  }
};
struct Sub : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    if constexpr (std::is_integral_v<C>) return static_cast<C>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
    return a - b;
  }
};
struct Mul : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    if constexpr (std::is_integral_v<C>) return static_cast<C>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    return a * b;
  }
};
struct Div : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    if constexpr (std::is_integral_v<C>) return b == 0 ? 0 : b == -1 ? Sub::of<C>(0, a) : a / b;  // no trap
    return a / b;
  }
};
struct Pow : Arithmetic {
  static constexpr bool mixed = true;
  template <class C>
  static C of(C a, C b) {
    if (b == C(2)) return Mul::of<C>(a, a);
    return cast_number<C>(std::pow(static_cast<std::conditional_t<std::is_integral_v<C>, double, C>>(a), b));
  }
};
// A NaN on either side wins, as in numpy and ORT.
struct Min : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    return a < b || a != a ? a : b;
  }
};
struct Max : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    return a > b || a != a ? a : b;
  }
};
struct Equal : Comparison {
  template <class C>
  static C of(C a, C b) {
    return a == b;
  }
};
struct Less : Comparison {
  template <class C>
  static C of(C a, C b) {
    return a < b;
  }
};
struct LessOrEqual : Comparison {
  template <class C>
  static C of(C a, C b) {
    return a <= b;
  }
};
struct Greater : Comparison {
  template <class C>
  static C of(C a, C b) {
    return a > b;
  }
};
struct GreaterOrEqual : Comparison {
  template <class C>
  static C of(C a, C b) {
    return a >= b;
  }
};
struct And : Comparison {
  template <class C>
  static C of(C a, C b) {
    return a != 0 && b != 0;
  }
};
struct Or : Comparison {
  template <class C>
  static C of(C a, C b) {
    return a != 0 || b != 0;
  }
};
struct Xor : Comparison {
  template <class C>
  static C of(C a, C b) {
    return (a != 0) != (b != 0);
  }
};
// fmod=0: the sign of the divisor; fmod=1: of the dividend.
struct FloorMod : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    if constexpr (std::is_integral_v<C>) {
      if (b == 0 || b == -1) return 0;
      C rest = a % b;
      return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    } else {
      C rest = std::fmod(a, b);
      return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }
  }
};
struct TruncMod : Arithmetic {
  template <class C>
  static C of(C a, C b) {
    if constexpr (std::is_integral_v<C>) return b == 0 || b == -1 ? 0 : a % b;
    return std::fmod(a, b);
  }
};

Step make_mod(const Args& args) {
  return args.integer("fmod", 0) ? make_binary<TruncMod>(args) : make_binary<FloorMod>(args);
}

}  // namespace

GENAI_KERNEL("Add", make_binary<Add>);
GENAI_KERNEL("Sub", make_binary<Sub>);
GENAI_KERNEL("Mul", make_binary<Mul>);
GENAI_KERNEL("Div", make_binary<Div>);
GENAI_KERNEL("Pow", make_binary<Pow>);
GENAI_KERNEL("Min", make_binary<Min>);
GENAI_KERNEL("Max", make_binary<Max>);
GENAI_KERNEL("Mod", make_mod);
GENAI_KERNEL("Equal", make_binary<Equal>);
GENAI_KERNEL("Less", make_binary<Less>);
GENAI_KERNEL("LessOrEqual", make_binary<LessOrEqual>);
GENAI_KERNEL("Greater", make_binary<Greater>);
GENAI_KERNEL("GreaterOrEqual", make_binary<GreaterOrEqual>);
GENAI_KERNEL("And", make_binary<And>);
GENAI_KERNEL("Or", make_binary<Or>);
GENAI_KERNEL("Xor", make_binary<Xor>);

}  // namespace genai::GENAI_ISA
