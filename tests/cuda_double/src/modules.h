// Loaded images. PTX is translated to C++ and compiled by translate.py; its kernels come back in a shared library.
#pragma once

#include <cuda.h>

#include <memory>
#include <string>
#include <vector>

#include "executor.h"

struct CUkern_st {
  const cuda_double::KernelEntry* entry;
  CUlibrary library;
  int max_dynamic_shared = 48 << 10;  // more must be asked for, as on a device
};

struct CUlib_st {
  std::vector<std::unique_ptr<CUkern_st>> kernels;
};

namespace cuda_double {

CUresult load_image(const void* image, CUlibrary* out);
CUresult unload(CUlibrary library);
CUkern_st* find_kernel(CUlibrary library, const std::string& name);

// Copies the arguments at once: the caller's memory may be gone when the kernel runs.
CUresult prepare_launch(CUkern_st* kernel, Dim3 grid, Dim3 block, size_t dynamic_shared, void** arguments,
                        std::shared_ptr<Launch>* out);
CUresult run_launch(const Launch& launch);

}  // namespace cuda_double
