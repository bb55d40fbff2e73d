// What all parts share: one lock, one sticky error, the messages for the tests, options from the environment.
#pragma once

#include <cuda.h>

#include <cstdlib>
#include <mutex>
#include <string>

namespace cuda_double {

// Guards everything; held while device work runs, except host functions.
extern std::recursive_mutex lock;
extern CUresult sticky_error;  // a kernel fault poisons the context, as on a device

void report(const std::string& message);
std::string take_reports();

inline std::string option(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value ? value : fallback;
}
inline long option_number(const char* name, long fallback) {
  const char* value = std::getenv(name);
  return value ? std::atol(value) : fallback;
}

}  // namespace cuda_double
