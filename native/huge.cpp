#include "huge.h"

#include <sys/mman.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <new>

namespace genai {
namespace {

constexpr size_t kMapping = size_t{32} << 20, kPage = size_t{2} << 20, kLine = 64;

// One mapping: pieces are cut off its front, and it goes when the last of them has been given back.
struct Mapping {
  char* data;
  size_t size, used = 0, pieces = 0;
};

struct Mappings {
  std::mutex mutex;
  std::list<Mapping> all;  // the last one is cut from
};

Mappings& mappings() {
  static Mappings* made = new Mappings;  // never destroyed: weights may outlive static destruction
  return *made;
}

size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

Mapping map(size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(data, size, MADV_HUGEPAGE);  // a wish: without huge pages everything works, slower
#endif
  return {static_cast<char*>(data), size};
}

}  // namespace

void* take_huge(size_t nbytes) {
  nbytes = rounded(std::max<size_t>(nbytes, 1), kLine);
  std::lock_guard lock(mappings().mutex);
  auto& all = mappings().all;
  if (all.empty() || all.back().used + nbytes > all.back().size) {
    all.push_back(map(rounded(std::max(nbytes, kMapping), kPage)));
  }
  Mapping& mapping = all.back();
  char* piece = mapping.data + mapping.used;
  mapping.used += nbytes;
  ++mapping.pieces;
  return piece;
}

void give_back_huge(void* memory) noexcept {
  char* piece = static_cast<char*>(memory);
  std::lock_guard lock(mappings().mutex);
  auto& all = mappings().all;
  auto found = std::find_if(all.begin(), all.end(),
                            [&](const Mapping& m) { return piece >= m.data && piece < m.data + m.size; });
  if (found == all.end() || --found->pieces > 0) return;
  munmap(found->data, found->size);
  all.erase(found);
}

}  // namespace genai
