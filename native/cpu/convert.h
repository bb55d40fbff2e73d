// Element conversions. 16-bit floats are computed in float and rounded to nearest even once, when stored; NaNs stay
// NaNs (quiet, sign kept), overflow goes to infinity.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "dtype.h"

namespace genai::GENAI_ISA {

// Packed: weights in a mapped file may lie at any address.
struct [[gnu::packed]] half_t {
  uint16_t bits;
};
struct [[gnu::packed]] bfloat_t {
  uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float to_float(half_t half) {
  uint32_t sign = (half.bits & 0x8000u) << 16, rest = half.bits & 0x7fffu;
  // Shifted into place the exponent is 112 too small; infinities and NaNs need 224, subnormals a multiplication.
  uint32_t normal = (rest << 13) + (rest >= 0x7c00u ? 224u << 23 : 112u << 23);
  uint32_t small = bits_of_float(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  uint32_t quiet = rest > 0x7c00u ? 0x00400000u : 0u;
  return float_of_bits(sign | (rest < 0x400u ? small : normal | quiet));
}

inline half_t to_half(float value) {
  uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t odd = (rest >> 13) & 1u;
  uint32_t normal = (rest - (112u << 23) + 0xfffu + odd) >> 13;  // a carry runs into the exponent, up to infinity
  // Adding 0.5 puts a subnormal's last bit at the float's last bit, so the hardware rounds it to even.
  uint32_t small = bits_of_float(float_of_bits(rest < 0x38800000u ? rest : 0u) + 0.5f) - bits_of_float(0.5f);
  uint32_t result = rest < 0x38800000u ? small : (rest >= 0x47800000u ? 0x7c00u : normal);
  uint32_t nan = 0x7e00u | ((rest >> 13) & 0x3ffu);
  return {static_cast<uint16_t>(sign | (rest > 0x7f800000u ? nan : result))};
}

inline float to_float(bfloat_t value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

inline bfloat_t to_bfloat(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

inline void widen(const half_t* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

inline void widen(const bfloat_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

inline void narrow(const float* from, half_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), packed);
  }
#endif
  for (; i < n; ++i) to[i] = to_half(from[i]);
}

inline void narrow(const float* from, bfloat_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat(from[i]);
}

// What ONNX and numpy agree on is kept (truncation toward zero); what they leave open saturates, NaN becomes 0.
template <class To, class From>
To cast_number(From value) {
  if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    if (!(value == value)) return To(0);
    if (value <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (value >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    return static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

// Calls visit(T{}) with the C++ type that stores `dtype`.
template <class Visit>
decltype(auto) with_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f32:
      return visit(float{});
    case DType::f16:
      return visit(half_t{});
    case DType::bf16:
      return visit(bfloat_t{});
    case DType::f64:
      return visit(double{});
    case DType::i8:
      return visit(int8_t{});
    case DType::u8:
      return visit(uint8_t{});
    case DType::i16:
      return visit(int16_t{});
    case DType::u16:
      return visit(uint16_t{});
    case DType::i32:
      return visit(int32_t{});
    case DType::u32:
      return visit(uint32_t{});
    case DType::i64:
      return visit(int64_t{});
    case DType::u64:
      return visit(uint64_t{});
    default:
      return visit(bool{});
  }
}

template <class T>
constexpr bool is_16bit = std::is_same_v<T, half_t> || std::is_same_v<T, bfloat_t>;

// Elements [offset, offset + n) as C (float, double or int64_t).
template <class C>
void read_block(const void* data, DType dtype, int64_t offset, int64_t n, C* to) {
  with_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    const char* from = static_cast<const char*>(data) + offset * sizeof(T);
    if constexpr (is_16bit<T> && std::is_same_v<C, float>) {
      widen(reinterpret_cast<const T*>(from), to, n);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        T value;  // at any address, too
        std::memcpy(&value, from + i * sizeof(T), sizeof(T));
        if constexpr (is_16bit<T>) {
          to[i] = cast_number<C>(to_float(value));
        } else {
          to[i] = cast_number<C>(value);
        }
      }
    }
  });
}

template <class C>
void write_block(void* data, DType dtype, int64_t offset, int64_t n, const C* from) {
  with_type(dtype, [&](auto sample) {
    using T = decltype(sample);
    T* to = static_cast<T*>(data) + offset;
    if constexpr (is_16bit<T> && std::is_same_v<C, float>) {
      narrow(from, to, n);
    } else if constexpr (std::is_same_v<T, half_t>) {
      for (int64_t i = 0; i < n; ++i) to[i] = to_half(static_cast<float>(from[i]));
    } else if constexpr (std::is_same_v<T, bfloat_t>) {
      for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat(static_cast<float>(from[i]));
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = cast_number<T>(from[i]);
    }
  });
}

// A pointer to n elements as C: the tensor's own memory when that is what it holds, else `buffer`.
template <class C>
const C* block_of(const Tensor& tensor, int64_t offset, int64_t n, C* buffer) {
  constexpr DType own = std::is_same_v<C, float> ? DType::f32 : std::is_same_v<C, double> ? DType::f64 : DType::i64;
  const C* data = static_cast<const C*>(tensor.data) + offset;
  if (tensor.dtype == own && reinterpret_cast<uintptr_t>(data) % alignof(C) == 0) return data;
  read_block(tensor.data, tensor.dtype, offset, n, buffer);
  return buffer;
}

}  // namespace genai::GENAI_ISA
