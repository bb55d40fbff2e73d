// A product for kernels that have their rows in f32; the sums are those of MatMul.
#pragma once

#include "cpu/check.h"
#include "threads.h"

namespace genai::GENAI_ISA {

// y [m, n] = rows [m, k] times the transpose of `weights` [n, k] of a float dtype, at any address.
void multiply_rows(ThreadPool& pool, const float* rows, int64_t m, int64_t k, const void* weights, DType dtype,
                   int64_t n, float* y);

}  // namespace genai::GENAI_ISA
