// Device and pinned memory. Every byte has a state: allocated in stream order, live, or freed; fresh bytes are poison.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "abi.h"

namespace cuda_double {

enum class MemoryKind { device, pinned };
enum class MemoryState { promised, live, freed };  // promised: the stream has not reached its allocation yet

struct Allocation {
  char* data;
  size_t size;
  MemoryKind kind;
  MemoryState state;
  unsigned long long serial;
  const char* origin;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const { return begin() + size; }
};

// 0xFF in odd bytes: NaN as f16, bf16, f32 and f64, negative as an integer. `mark` tells who poisoned.
void poison(void* data, size_t size, unsigned char mark);

Allocation* allocate(size_t size, MemoryKind kind, const char* origin, bool live);  // nullptr: out of memory
void make_live(Allocation* allocation);
void release(Allocation* allocation);  // bytes stay in quarantine for a while, so that late uses are told

Allocation* find_allocation(uintptr_t address);  // also freed ones, while they are in quarantine
bool is_device(uintptr_t address);
bool is_pinned(uintptr_t address);
bool in_live_memory(uintptr_t address, size_t size);
bool live_segment(uint64_t address, unsigned size, Segment* out);
std::string describe(uintptr_t address);

size_t device_bytes_used();
size_t device_bytes_total();
void set_device_bytes_total(size_t bytes);
std::string leak_report(int* count);

}  // namespace cuda_double
