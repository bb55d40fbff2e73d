// Runs a grid on the CPU: one fiber for each thread of a block, blocks one after another on the calling OS thread.
#pragma once

#include <string>
#include <vector>

#include "abi.h"

namespace cuda_double {

struct Launch {
  const KernelEntry* kernel = nullptr;
  Dim3 grid, block;
  size_t dynamic_shared = 0;
  std::vector<char> arguments;  // each at a multiple of 16
};

const Services* executor_services();

// A CUresult; `message` tells kernel, block and thread of a fault.
int run_grid(const Launch& launch, std::string* message);

}  // namespace cuda_double
