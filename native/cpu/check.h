// What factories say when arguments are wrong: rule and value, once, at the door.
#pragma once

#include <cstring>

#include "dtype.h"

namespace genai::GENAI_ISA {

using Shape = std::vector<int64_t>;

[[noreturn]] inline void refuse(const std::string& text) { throw std::invalid_argument(text); }

inline const Tensor& input(const Args& args, size_t index, const char* name) {
  if (index >= args.in.size() || !args.in[index])
    refuse("input " + std::to_string(index) + " `" + name + "` is missing");
  return args.in[index];
}

// A missing optional input is a Tensor without data.
inline Tensor optional_input(const Args& args, size_t index) {
  return index < args.in.size() ? args.in[index] : Tensor{};
}

inline const Tensor& output(const Args& args, size_t index = 0) {
  if (index >= args.out.size() || !args.out[index]) refuse("output " + std::to_string(index) + " is missing");
  return args.out[index];
}

inline Tensor optional_output(const Args& args, size_t index) {
  return index < args.out.size() ? args.out[index] : Tensor{};
}

inline void want_shape(const Tensor& tensor, const Shape& shape, const char* name) {
  if (tensor.shape != shape)
    refuse(std::string("`") + name + "` is " + describe(tensor) + ", wanted shape " + describe(shape));
}

inline void want_dtype(const Tensor& tensor, DType dtype, const char* name) {
  if (tensor.dtype != dtype) {
    refuse(std::string("`") + name + "` is " + describe(tensor) + ", wanted " + name_of(dtype));
  }
}

inline void want_float(const Tensor& tensor, const char* name) {
  if (!is_float(tensor.dtype))
    refuse(std::string("`") + name + "` is " + describe(tensor) + ", wanted a 16- or 32-bit float");
}

inline int64_t want_axis(int64_t axis, int64_t rank) {
  if (axis < -rank || axis >= rank) refuse("axis " + std::to_string(axis) + " is outside rank " + std::to_string(rank));
  return axis < 0 ? axis + rank : axis;
}

inline int64_t product(const Shape& shape, size_t first, size_t last) {
  int64_t n = 1;
  for (size_t i = first; i < last; ++i) n *= shape[i];
  return n;
}

// Element i of an int64 or int32 tensor, wherever it lies.
inline int64_t integer_at(const Tensor& tensor, int64_t i) {
  int64_t wide;
  int32_t narrow;
  if (tensor.dtype == DType::i64) {
    std::memcpy(&wide, static_cast<const char*>(tensor.data) + i * sizeof(wide), sizeof(wide));
    return wide;
  }
  std::memcpy(&narrow, static_cast<const char*>(tensor.data) + i * sizeof(narrow), sizeof(narrow));
  return narrow;
}

// All of them: shapes, axes and the like are read while recording.
inline Shape integers_in(const Tensor& tensor) {
  Shape values(tensor.size());
  for (int64_t i = 0; i < tensor.size(); ++i) values[i] = integer_at(tensor, i);
  return values;
}

}  // namespace genai::GENAI_ISA
