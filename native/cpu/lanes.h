// Sixteen floats at a time, on every instruction set: the compiler splits them into what the machine has. Sums keep
// sixteen partial sums and add them in one fixed tree, so a row's result never depends on where or beside what it is
// computed.
#pragma once

#include <cmath>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/convert.h"

namespace genai::GENAI_ISA {

constexpr int64_t kLanes = 16;
#if defined(__AVX512F__)
constexpr int kRegister = 64;  // bytes
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

// N elements in as many whole registers as they need. (One wider vector type would do, but compilers keep those in
// memory.)
template <class T, int N>
struct Pack {
  static constexpr int kParts = N * sizeof(T) / kRegister;
  typedef T Part __attribute__((vector_size(kRegister)));
  Part part[kParts];

  T operator[](int i) const { return part[i * sizeof(T) / kRegister][i % (kRegister / sizeof(T))]; }

  static Pack all(T value) {
    return make([&](int) { return value - Part{}; });  // a plain broadcast: x - 0 is x, also for -0
  }

  template <class F>
  static Pack make(F f) {
    Pack made;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) made.part[p] = f(p);
    return made;
  }

#define GENAI_LANES_OPERATOR(op)                                \
  friend Pack operator op(const Pack& a, const Pack& b) {       \
    return make([&](int p) { return a.part[p] op b.part[p]; }); \
  }                                                             \
  friend Pack operator op(const Pack& a, T b) {                 \
    return make([&](int p) { return a.part[p] op b; });         \
  }                                                             \
  friend Pack operator op(T a, const Pack& b) {                 \
    return make([&](int p) { return a op b.part[p]; });         \
  }
  GENAI_LANES_OPERATOR(+)
  GENAI_LANES_OPERATOR(-)
  GENAI_LANES_OPERATOR(*)
  GENAI_LANES_OPERATOR(/)
  GENAI_LANES_OPERATOR(&)
  GENAI_LANES_OPERATOR(|)
#undef GENAI_LANES_OPERATOR
  friend Pack operator-(const Pack& a) {
    return make([&](int p) { return -a.part[p]; });
  }
  friend Pack operator<<(const Pack& a, int n) {
    return make([&](int p) { return a.part[p] << n; });
  }
  friend Pack operator>>(const Pack& a, int n) {
    return make([&](int p) { return a.part[p] >> n; });
  }
  Pack& operator+=(const Pack& b) { return *this = *this + b; }
};

using v16 = Pack<float, 16>;
using m16 = Pack<int32_t, 16>;
using d8 = Pack<double, 8>;
using l8 = Pack<int64_t, 8>;

template <class To, class From>
To reinterpret(const From& value) {
  return To::make([&](int p) { return reinterpret_cast<typename To::Part>(value.part[p]); });
}

template <class T>
using MaskOf = Pack<std::conditional_t<sizeof(T) == 4, int32_t, int64_t>, 64 / sizeof(T)>;  // 0 or -1 a lane

#define GENAI_LANES_COMPARE(op)                                            \
  template <class T, int N>                                                \
  MaskOf<T> operator op(const Pack<T, N>& a, T b) {                        \
    return MaskOf<T>::make([&](int p) { return a.part[p] op b; });         \
  }                                                                        \
  template <class T, int N>                                                \
  MaskOf<T> operator op(const Pack<T, N>& a, const Pack<T, N>& b) {        \
    return MaskOf<T>::make([&](int p) { return a.part[p] op b.part[p]; }); \
  }
GENAI_LANES_COMPARE(<)
GENAI_LANES_COMPARE(>)
GENAI_LANES_COMPARE(>=)
GENAI_LANES_COMPARE(==)
#undef GENAI_LANES_COMPARE

template <class T, int N>
Pack<T, N> select(const MaskOf<T>& mask, const Pack<T, N>& yes, const Pack<T, N>& no) {
  return Pack<T, N>::make([&](int p) { return mask.part[p] ? yes.part[p] : no.part[p]; });
}

inline v16 load(const float* from) {
  return v16::make([&](int p) {
    v16::Part part;
    std::memcpy(&part, from + p * (kRegister / 4), kRegister);
    return part;
  });
}

inline void store(float* to, const v16& value) {
#pragma GCC unroll 4
  for (int p = 0; p < v16::kParts; ++p) std::memcpy(to + p * (kRegister / 4), &value.part[p], kRegister);
}

inline v16 load_part(const float* from, int64_t n) {
  float padded[kLanes] = {};
  std::memcpy(padded, from, n * sizeof(float));
  return load(padded);
}

inline v16 load(const half_t* from) {
#if defined(__AVX512F__)
  v16 value;
  value.part[0] =
      reinterpret_cast<v16::Part>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  return value;
#elif defined(__F16C__)
  return v16::make([&](int p) {
    return reinterpret_cast<v16::Part>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + p)));
  });
#else
  float wide[kLanes];
  widen(from, wide, kLanes);
  return load(wide);
#endif
}

inline v16 load(const bfloat_t* from) {
  constexpr int kCount = kRegister / 4;
  return reinterpret<v16>(m16::make([&](int p) {
    uint16_t __attribute__((vector_size(kRegister / 2))) bits;
    std::memcpy(&bits, from + p * kCount, sizeof(bits));
    return __builtin_convertvector(bits, m16::Part) << 16;
  }));
}

template <class T>
v16 load_part(const T* from, int64_t n) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}

inline v16 all(float value) { return v16::all(value); }
inline v16 bits_as_float(const m16& bits) { return reinterpret<v16>(bits); }
inline m16 float_as_bits(const v16& value) { return reinterpret<m16>(value); }
inline v16 larger(const v16& a, const v16& b) { return select(a > b, a, b); }

// a * b + c, with one rounding where the machine can.
inline v16 multiply_add(const v16& a, const v16& b, const v16& c) {
  return v16::make([&](int p) {
#if defined(__AVX512F__)
    return reinterpret_cast<v16::Part>(_mm512_fmadd_ps(
        reinterpret_cast<__m512>(a.part[p]), reinterpret_cast<__m512>(b.part[p]), reinterpret_cast<__m512>(c.part[p])));
#elif defined(__FMA__)
    return reinterpret_cast<v16::Part>(_mm256_fmadd_ps(
        reinterpret_cast<__m256>(a.part[p]), reinterpret_cast<__m256>(b.part[p]), reinterpret_cast<__m256>(c.part[p])));
#elif defined(__ARM_FEATURE_FMA)
    return vfmaq_f32(c.part[p], a.part[p], b.part[p]);
#else
    return a.part[p] * b.part[p] + c.part[p];
#endif
  });
}

// ((0+8)+(4+12)) + ... : lanes are halved until four are left.
inline float sum_lanes(const v16& x) {
  typedef float Four __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  auto eight = __builtin_shufflevector(x.part[0], x.part[0], 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x.part[0], x.part[0], 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  auto eight = x.part[0] + x.part[1];
#endif
#if defined(__AVX2__)
  Four four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
  Four four = (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
#endif
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float max_lanes(const v16& x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline double sum_lanes(const d8& x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// Eight floats from x on, as doubles.
inline d8 widened(const float* x) {
  return d8::make([&](int p) {
    typedef float Half __attribute__((vector_size(kRegister / 2)));
    Half half;
    std::memcpy(&half, x + p * (kRegister / 8), sizeof(half));
    return __builtin_convertvector(half, d8::Part);
  });
}

// f on doubles, rounded to float.
template <class F>
v16 through_double(const v16& x, F&& f) {
  float lanes[kLanes];
  store(lanes, x);
  for (int first = 0; first < kLanes; first += 8) {
    d8 result = f(widened(lanes + first));
    for (int p = 0; p < d8::kParts; ++p) {
      auto half = __builtin_convertvector(result.part[p], float __attribute__((vector_size(kRegister / 2))));
      std::memcpy(lanes + first + p * (kRegister / 8), &half, sizeof(half));
    }
  }
  return load(lanes);
}

// Sum of f(lane values) over n floats, in double.
template <class F>
double sum_of(const float* x, int64_t n, F&& f) {
  d8 low{}, high{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    low += f(widened(x + i));
    high += f(widened(x + i + 8));
  }
  double sum = sum_lanes(low + high);
  for (; i < n; ++i) sum += f(d8::all(x[i]))[0];
  return sum;
}

// y[i] = f(x[i]); the last incomplete vector is padded with zeros. x and y may be the same.
template <class F>
void map_lanes(const float* x, float* y, int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, f(load(x + i)));
  if (i < n) {
    v16 rest = f(load_part(x + i, n - i));
    std::memcpy(y + i, &rest, (n - i) * sizeof(float));
  }
}

// e^x, within 1.2 ulp over the whole range, subnormal results included; NaN stays NaN.
inline v16 exponential(v16 x) {
  constexpr float kLog2e = 1.44269504f, kRound = 12582912.0f;          // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // n * kLn2High is exact for |n| < 2^15
  x = select(x < -104.0f, all(-104.0f), select(x > 89.0f, all(89.0f), x));
  v16 rounded = x * kLog2e + kRound;
  m16 n = float_as_bits(rounded) - static_cast<int32_t>(0x4b400000);
  v16 whole = rounded - kRound;
  v16 r = (x - whole * kLn2High) - whole * kLn2Low;  // |r| <= ln(2)/2: the Taylor series to r^7 errs by 2^-27
  v16 tail = all(1.0f / 5040);
  tail = tail * r + 1.0f / 720;
  tail = tail * r + 1.0f / 120;
  tail = tail * r + 1.0f / 24;
  tail = tail * r + 1.0f / 6;
  tail = tail * r + 0.5f;
  v16 power = (tail * r * r + r) + 1.0f;
  m16 first = n >> 1, second = n - first;  // two factors, so that neither leaves the exponent's range
  return power * bits_as_float((first + 127) << 23) * bits_as_float((second + 127) << 23);
}

inline v16 sigmoid(const v16& x) { return 1.0f / (1.0f + exponential(-x)); }

// e^x in double for x in [-700, 700].
inline d8 exponential(const d8& x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  d8 rounded = x * 1.4426950408889634 + kRound;
  l8 n = reinterpret<l8>(rounded) - int64_t{0x4338000000000000};
  d8 whole = rounded - kRound;
  d8 r = (x - whole * 0x1.62e42feep-1) - whole * 0x1.a39ef35793c76p-33;
  d8 sum = d8::all(1.0);
  for (int k = 11; k >= 1; --k) sum = sum * r * (1.0 / k) + 1.0;
  return sum * reinterpret<d8>((n + int64_t{1023}) << 52);
}

// tanh through double: no cancellation, within 0.51 ulp.
inline d8 hyperbolic_tangent(const d8& x) {
  d8 size = select(x < 0.0, -x, x);
  d8 decay = exponential(-2.0 * select(size > 20.0, d8::all(20.0), size));
  d8 big = (1.0 - decay) / (1.0 + decay);
  d8 tiny = x * (1.0 - x * x * (1.0 / 3));
  return select(size >= 1e-3, select(x < 0.0, -big, big), tiny);  // NaN falls to tiny and stays
}

inline v16 hyperbolic_tangent(const v16& x) {
  return through_double(x, [](const d8& half) { return hyperbolic_tangent(half); });
}

}  // namespace genai::GENAI_ISA
