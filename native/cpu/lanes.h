// Sixteen floats at a time, on every instruction set: the compiler splits them into what the machine has. Sums keep sixteen
// partial sums and add them in one fixed tree, so a row's result never depends on where or beside what it is computed.
#pragma once

#include <cmath>
#include <cstring>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "cpu/convert.h"

namespace genai::GENAI_ISA {

constexpr int64_t kLanes = 16;
using v16 = float __attribute__((vector_size(64)));
using m16 = int32_t __attribute__((vector_size(64)));
using d8 = double __attribute__((vector_size(64)));
using v8 = float __attribute__((vector_size(32)));

inline v16 load(const float* from) {
  v16 value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void store(float* to, v16 value) { std::memcpy(to, &value, sizeof(value)); }

inline v16 load_part(const float* from, int64_t n) {
  v16 value{};
  std::memcpy(&value, from, n * sizeof(float));
  return value;
}

inline v16 load(const half_t* from) {
  v16 value;
  widen(from, reinterpret_cast<float*>(&value), kLanes);
  return value;
}

inline v16 load(const bfloat_t* from) {
  uint16_t __attribute__((vector_size(32))) bits;
  std::memcpy(&bits, from, sizeof(bits));
  return reinterpret_cast<v16>(__builtin_convertvector(bits, m16) << 16);
}

template <class T>
v16 load_part(const T* from, int64_t n) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}

inline v16 all(float value) { return v16{} + value; }
inline v16 select(m16 mask, v16 yes, v16 no) { return mask ? yes : no; }
inline v16 bits_as_float(m16 bits) { return reinterpret_cast<v16>(bits); }
inline m16 float_as_bits(v16 value) { return reinterpret_cast<m16>(value); }
inline v16 absolute(v16 x) { return bits_as_float(float_as_bits(x) & 0x7fffffff); }
inline v16 copy_sign(v16 size, v16 sign) {
  return bits_as_float((float_as_bits(size) & 0x7fffffff) | (float_as_bits(sign) & static_cast<int32_t>(0x80000000u)));
}
inline v16 larger(v16 a, v16 b) { return select(a > b, a, b); }

// a * b + c, with one rounding where the machine can.
inline v16 multiply_add(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
  return reinterpret_cast<v16>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  union Halves {
    v16 whole;
    __m256 half[2];
  };
  Halves x{a}, y{b}, z{c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}

inline float sum_lanes(v16 x) {
  using v4 = float __attribute__((vector_size(16)));
  v8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  v4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float max_lanes(v16 x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline double sum_lanes(d8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
inline d8 low_half(v16 x) { return __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), d8); }
inline d8 high_half(v16 x) {
  return __builtin_convertvector(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15), d8);
}
inline v16 join(d8 low, d8 high) {
  return __builtin_shufflevector(__builtin_convertvector(low, v8), __builtin_convertvector(high, v8), 0, 1, 2, 3, 4, 5, 6, 7,
                                 8, 9, 10, 11, 12, 13, 14, 15);
}

// Sum of f(lane values) over n floats, in double.
template <class F>
double sum_of(const float* x, int64_t n, F&& f) {
  d8 low{}, high{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    v16 value = load(x + i);
    low += f(low_half(value));
    high += f(high_half(value));
  }
  double sum = sum_lanes(low + high);
  for (; i < n; ++i) sum += f(d8{} + static_cast<double>(x[i]))[0];
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

inline v16 sigmoid(v16 x) { return 1.0f / (1.0f + exponential(-x)); }

// e^x in double for x in [-700, 700].
inline d8 exponential(d8 x) {
  using l8 = int64_t __attribute__((vector_size(64)));
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  d8 rounded = x * 1.4426950408889634 + kRound;
  l8 n = reinterpret_cast<l8>(rounded) - static_cast<int64_t>(0x4338000000000000);
  d8 whole = rounded - kRound;
  d8 r = (x - whole * 0x1.62e42feep-1) - whole * 0x1.a39ef35793c76p-33;
  d8 sum = d8{} + 1.0;
  for (int k = 11; k >= 1; --k) sum = sum * r * (1.0 / k) + 1.0;
  return sum * reinterpret_cast<d8>((n + 1023) << 52);
}

// tanh through double: no cancellation, within 0.51 ulp.
inline d8 hyperbolic_tangent(d8 x) {
  d8 size = x < 0.0 ? -x : x;
  d8 decay = exponential(-2.0 * (size > 20.0 ? d8{} + 20.0 : size));
  d8 big = (1.0 - decay) / (1.0 + decay);
  d8 tiny = x - x * x * x * (1.0 / 3);
  return size >= 1e-3 ? (x < 0.0 ? -big : big) : tiny;  // NaN falls to tiny and stays
}

inline v16 hyperbolic_tangent(v16 x) { return join(hyperbolic_tangent(low_half(x)), hyperbolic_tangent(high_half(x))); }

}  // namespace genai::GENAI_ISA
