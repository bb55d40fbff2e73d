// Memory in huge pages, for weights that every step reads from end to end: with small pages, address translation and
// prefetchers that stop at each page's end cost a fifth of the bandwidth.
#pragma once

#include <cstddef>

namespace genai {

// At least 64-byte aligned; many pieces share a mapping. Throws std::bad_alloc.
void* take_huge(size_t nbytes);
void give_back_huge(void* memory) noexcept;

// For std::vector.
template <class T>
struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <class U>
  HugePages(const HugePages<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(take_huge(n * sizeof(T))); }
  void deallocate(T* memory, size_t) noexcept { give_back_huge(memory); }
  friend bool operator==(const HugePages&, const HugePages&) { return true; }
};

}  // namespace genai
