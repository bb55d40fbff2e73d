// Cast between every pair of numeric types.
#include "cpu/check.h"
#include "cpu/convert.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

constexpr int64_t kBlock = 512;

// The float beside `value` whose last bit is odd when `value` is not a float: rounding it again to 16 bits rounds once.
float round_to_odd(double value) {
  float nearest = static_cast<float>(value);
  double error = value - nearest;
  if (error == 0 || value != value || std::isinf(nearest) || (bits_of_float(nearest) & 1)) return nearest;
  bool outward = (error > 0) == (nearest > 0) && nearest != 0;
  if (nearest == 0) return std::copysign(float_of_bits(1), static_cast<float>(error));
  return float_of_bits(bits_of_float(nearest) + (outward ? 1 : -1));
}

template <class C>
Step cast_through(const Tensor& x, const Tensor& y) {
  return [=](Context& context) {
    context.pool.parallel_for(x.size(), 16 * kBlock, [&](int64_t begin, int64_t end, int) {
      alignas(64) C in[kBlock];
      for (int64_t at = begin; at < end; at += kBlock) {
        int64_t n = std::min(kBlock, end - at);
        const C* values = block_of(x, at, n, in);
        if constexpr (std::is_same_v<C, double>) {
          if (y.dtype == DType::f16 || y.dtype == DType::bf16) {
            alignas(64) float odd[kBlock];
            for (int64_t i = 0; i < n; ++i) odd[i] = round_to_odd(values[i]);
            write_block(y.data, y.dtype, at, n, odd);
            continue;
          }
        }
        write_block(y.data, y.dtype, at, n, values);
      }
    });
  };
}

// uint64 goes through its own type: neither int64 nor double holds all of it.
Step cast_unsigned(const Tensor& x, const Tensor& y) {
  return [=](Context&) {
    for (int64_t i = 0; i < x.size(); ++i) {
      uint64_t value;
      std::memcpy(&value, static_cast<const char*>(x.data) + 8 * i, 8);
      write_block(y.data, y.dtype, i, 1, &value);
    }
  };
}

Step make_cast(const Args& args) {
  const Tensor &x = input(args, 0, "input"), &y = output(args);
  want_shape(y, x.shape, "output");
  if (x.dtype == DType::u64) return cast_unsigned(x, y);
  if (is_float(x.dtype)) return cast_through<float>(x, y);
  if (x.dtype == DType::f64) return cast_through<double>(x, y);
  return cast_through<int64_t>(x, y);
}

}  // namespace

GENAI_KERNEL("Cast", make_cast);

}  // namespace genai::GENAI_ISA
