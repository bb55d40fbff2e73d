// Names and sizes of element types, and the words of error messages about tensors.
#pragma once

#include <string>

#include "kernel.h"

namespace genai {

int64_t size_of(DType dtype);
const char* name_of(DType dtype);            // numpy's name, e.g. "float32"
DType dtype_from(const std::string& name);   // throws std::invalid_argument
std::string describe(const Tensor& tensor);  // "float32[1, 3, 8]"
std::string describe(const std::vector<int64_t>& shape);

inline bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

}  // namespace genai
