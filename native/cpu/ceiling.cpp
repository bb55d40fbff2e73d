// What the processor can do at most: multiplying floats, multiplying bytes. No op is made of these; the benchmark
// divides by them.
#include "cpu/check.h"
#include "cpu/lanes.h"
#include "threads.h"

namespace genai::GENAI_ISA {
namespace {

// Independent sums, enough to hide an instruction's latency, few enough to stay in registers.
constexpr int kChains = kRegister == 64 ? 12 : kRegister == 32 ? 5 : 3;

// bench.FloatPeak: X [>= 32] -> one sum a thread; `rounds` times kChains * 16 multiplications and additions a thread.
// The output's second row holds how many a thread did.
Step make_float_peak(const Args& args) {
  Tensor x = input(args, 0, "X"), out = output(args);
  want_dtype(x, DType::f32, "X");
  want_dtype(out, DType::f32, "output");
  if (x.size() < 2 * kLanes) throw std::invalid_argument("X holds fewer than 32 numbers");
  int64_t rounds = args.integer("rounds", 1);
  return [=](Context& context) {
    int64_t threads = context.pool.size();
    if (out.size() < 2 * threads) throw std::out_of_range("bench.FloatPeak: fewer outputs than two a thread");
    context.pool.parallel_for(threads, 1, [&](int64_t begin, int64_t end, int) {
      const float* from = static_cast<const float*>(x.data);
      for (int64_t t = begin; t < end; ++t) {
        v16 a = load(from), b = load(from + kLanes), sums[kChains];
        for (int i = 0; i < kChains; ++i) sums[i] = a * float(i);  // of equal chains the compiler would keep one
        for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
          for (int i = 0; i < kChains; ++i) sums[i] = multiply_add(sums[i], a, b);
        }
        v16 total = sums[0];
        for (int i = 1; i < kChains; ++i) total += sums[i];
        static_cast<float*>(out.data)[t] = sum_lanes(total);
        static_cast<float*>(out.data)[threads + t] = float(2 * kLanes * kChains * rounds);
      }
    });
  };
}

// One register of unsigned bytes times one of signed ones, four products added to each 32-bit sum: as in MatMulNBits.
m16::Part dot_bytes(m16::Part sum, m16::Part a, m16::Part b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<m16::Part>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  __m512i pairs = _mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
  return sum + reinterpret_cast<m16::Part>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  return sum + reinterpret_cast<m16::Part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  for (int shift = 0; shift < 32; shift += 8) sum += ((a >> shift) & 255) * ((b << (24 - shift)) >> 24);
  return sum;
#endif
}

// bench.BytePeak: the same with bytes; X i8 [>= 64].
Step make_byte_peak(const Args& args) {
  constexpr int kSums = kRegister == 16 ? 3 : 10;
  Tensor x = input(args, 0, "X"), out = output(args);
  want_dtype(x, DType::i8, "X");
  want_dtype(out, DType::f32, "output");
  if (x.size() < 64) throw std::invalid_argument("X holds fewer than 64 bytes");
  int64_t rounds = args.integer("rounds", 1);
  return [=](Context& context) {
    int64_t threads = context.pool.size();
    if (out.size() < 2 * threads) throw std::out_of_range("bench.BytePeak: fewer outputs than two a thread");
    context.pool.parallel_for(threads, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        m16::Part a, sums[kSums] = {};
        std::memcpy(&a, x.data, sizeof(a));
        m16::Part b = a;
        for (int i = 0; i < kSums; ++i) sums[i] += i;
        for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 10
          for (int i = 0; i < kSums; ++i) {
            asm volatile("" : "+x"(a));  // every product is made anew
            sums[i] = dot_bytes(sums[i], a, b);
          }
        }
        m16::Part total = sums[0];
        for (int i = 1; i < kSums; ++i) total += sums[i];
        static_cast<float*>(out.data)[t] = float(total[0]);
        static_cast<float*>(out.data)[threads + t] = float(2 * kRegister * kSums * rounds);
      }
    });
  };
}

}  // namespace

GENAI_KERNEL("bench.FloatPeak", make_float_peak);
GENAI_KERNEL("bench.BytePeak", make_byte_peak);

}  // namespace genai::GENAI_ISA
