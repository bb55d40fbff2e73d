// Memory a kernel needs while it runs, kept by each thread for the next call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace genai::GENAI_ISA {

// At least n elements, 64-byte aligned, uninitialised; valid until the thread asks again with the same Tag.
template <class T, class Tag>
T* scratch(int64_t n) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t held = 0;
  size_t nbytes = (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
  if (nbytes > held) {
    memory.reset(std::aligned_alloc(64, nbytes));
    held = memory ? nbytes : 0;
    if (!memory) throw std::bad_alloc();
  }
  return static_cast<T*>(memory.get());
}

}  // namespace genai::GENAI_ISA
