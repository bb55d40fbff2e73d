// genai.SiluMul: gate * sigmoid(gate) * up in one pass, rounded where Sigmoid, Mul and Mul would each round.
#include "cpu/check.h"
#include "cpu/lanes.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

constexpr int64_t kBlock = 512;

Step make_silu_mul(const Args& args) {
  Tensor gate = input(args, 0, "gate"), up = input(args, 1, "up"), out = output(args);
  want_float(gate, "gate");
  for (const Tensor* other : {&up, &out}) {
    want_shape(*other, gate.shape, "up or output");
    want_dtype(*other, gate.dtype, "up or output");
  }
  return [=](Context& context) {
    context.pool.parallel_for(gate.size(), 8 * kBlock, [&](int64_t begin, int64_t end, int) {
      alignas(64) float first[kBlock], second[kBlock], value[kBlock];
      auto round = [&](int64_t n) {
        if (gate.dtype == DType::f32) return;
        uint16_t bits[kBlock];
        write_block(bits, gate.dtype, 0, n, value);
        read_block(bits, gate.dtype, 0, n, value);
      };
      for (int64_t at = begin; at < end; at += kBlock) {
        int64_t n = std::min(kBlock, end - at);
        const float *x = block_of(gate, at, n, first), *y = block_of(up, at, n, second);
        map_lanes(x, value, n, [](v16 lane) { return sigmoid(lane); });
        round(n);
        for (int64_t i = 0; i < n; ++i) value[i] = x[i] * value[i];
        round(n);
        for (int64_t i = 0; i < n; ++i) value[i] = value[i] * y[i];
        write_block(out.data, out.dtype, at, n, value);
      }
    });
  };
}

}  // namespace

GENAI_KERNEL("genai.SiluMul", make_silu_mul);

}  // namespace genai::GENAI_ISA
