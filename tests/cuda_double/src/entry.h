// How an entry point of the driver is written: ENTRY(cuName, CUDA version in which this ABI appeared, parameters) { ...
// } The table is keyed by both, because cuda-python asks for each function by name and version.
#pragma once

#include <cuda.h>

#include "state.h"
#include "streams.h"

namespace cuda_double {

struct EntryPoint {
  EntryPoint(const char* name, int version, void* function);
  const char* name;
  int version;
  void* function;
  EntryPoint* next;
};

extern bool initialised;
CUcontext current_context();
void* find_entry_point(const char* name, int version);

#define ENTRY(name, version, ...)                                                                            \
  static CUresult name##_at_##version(__VA_ARGS__);                                                          \
  static const ::cuda_double::EntryPoint name##_row_##version(#name, version,                                \
                                                              reinterpret_cast<void*>(name##_at_##version)); \
  static CUresult name##_at_##version(__VA_ARGS__)

#define NEEDS_DRIVER                                   \
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED; \
  std::lock_guard guard_(lock)

#define NEEDS_CONTEXT                    \
  NEEDS_DRIVER;                          \
  if (sticky_error) return sticky_error; \
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT

#define REFUSE_IF(condition) \
  if (condition) return CUDA_ERROR_INVALID_VALUE

}  // namespace cuda_double
