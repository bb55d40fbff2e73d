// The contract between the driver double and a kernel library that translate.py made from PTX.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_double {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  size_t volume() const { return size_t(x) * y * z; }
};

struct Thread {
  Dim3 index;
  unsigned linear = 0, lane = 0;
};

// The bounds of the allocation a 4 KiB page was last seen in; emptied at each launch.
struct Segment {
  uint64_t page = 0, begin = 0, end = 0;
};

struct Block {
  Dim3 index, dim, grid;
  char* shared = nullptr;  // static shared memory first, dynamic after it
  size_t shared_size = 0;
  Segment segments[64];
};

struct Votes {
  int count;
  bool all, any;
};

struct Exchange {
  const uint64_t* values;  // [32], by lane
  unsigned active;         // lanes that took part
};

// What a running kernel may ask of the executor.
struct Services {
  Votes (*barrier)(int line, bool vote);
  Exchange (*exchange)(unsigned mask, uint64_t value);
  void (*check)(uint64_t address, unsigned size, Segment* out);  // fails unless [address, +size) is in live memory
  void (*fail)(int cuda_error, const char* message);             // does not return
  Thread** thread;
  Block* block;
};

struct KernelEntry {
  const char* name;
  void (*run)(void** arguments);
  const size_t* sizes;  // bytes of each parameter
  unsigned num_parameters;
  size_t static_shared;
  unsigned max_threads;  // .maxntid, 0: none given
  KernelEntry* next;
};

// Every kernel library exports `extern "C" KernelEntry* cuda_double_kernels(const Services*)`.
using KernelsFunction = KernelEntry* (*)(const Services*);

}  // namespace cuda_double
