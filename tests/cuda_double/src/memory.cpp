#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "state.h"

namespace cuda_double {
namespace {

constexpr size_t kAlignment = 256;   // what cuMemAlloc guarantees
constexpr size_t kQuarantine = 256;  // freed allocations kept for their messages
constexpr size_t kGap = 4096;        // between allocations: an address past one is never in the next

std::map<uintptr_t, Allocation*> allocations;
std::deque<Allocation*> quarantine;
size_t used = 0;
size_t total = size_t(option_number("CUDA_DOUBLE_MEMORY_MB", 2048)) << 20;
unsigned long long serial = 0;

size_t padded(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment + kGap; }

void forget_oldest() {
  Allocation* oldest = quarantine.front();
  quarantine.pop_front();
  allocations.erase(oldest->begin());
  std::free(oldest->data);
  delete oldest;
}

// The allocation at or nearest below the address, if the address lies in it or in the gap behind it.
Allocation* nearest(uintptr_t address) {
  auto above = allocations.upper_bound(address);
  if (above != allocations.begin()) {
    Allocation* below = std::prev(above)->second;
    if (address < below->end() + kGap) return below;
  }
  if (above != allocations.end() && above->second->begin() - address < kGap) return above->second;
  return nullptr;
}

const char* state_prefix(const Allocation& allocation) {
  switch (allocation.state) {
    case MemoryState::freed:
      return "use after free, ";
    case MemoryState::promised:
      return "used before its stream-ordered allocation, ";
    default:
      return "";
  }
}

std::string place(const Allocation& a, uintptr_t address) {
  if (address < a.begin()) return std::to_string(a.begin() - address) + " bytes before the start of";
  if (address < a.end()) return std::to_string(address - a.begin()) + " bytes into";
  return std::to_string(address - a.end()) + " bytes past the end of";
}

std::string label(const Allocation& a) {
  return "allocation #" + std::to_string(a.serial) + " (" + std::to_string(a.size) + " bytes, " + a.origin + ")";
}

}  // namespace

void poison(void* data, size_t size, unsigned char mark) {
  char* byte = static_cast<char*>(data);
  char* end = byte + size;
  auto one = [&] { *byte = char(reinterpret_cast<uintptr_t>(byte) & 1 ? 0xFF : mark), ++byte; };
  while (byte < end && reinterpret_cast<uintptr_t>(byte) & 7) one();
  const uint64_t word = 0xFF00FF00FF00FF00ull | 0x0001000100010001ull * mark;
  for (; end - byte >= 8; byte += 8) std::memcpy(byte, &word, 8);
  while (byte < end) one();
}

Allocation* allocate(size_t size, MemoryKind kind, const char* origin, bool live) {
  if (kind == MemoryKind::device && used + size > total) return nullptr;
  void* data = std::aligned_alloc(kAlignment, padded(size));
  if (!data) return nullptr;
  auto* made = new Allocation{static_cast<char*>(data), size, kind, MemoryState::promised, ++serial, origin};
  allocations[made->begin()] = made;
  if (kind == MemoryKind::device) used += size;
  if (live) make_live(made);
  return made;
}

void make_live(Allocation* allocation) {
  poison(allocation->data, allocation->size, 0xB5);
  allocation->state = MemoryState::live;
}

void release(Allocation* allocation) {
  poison(allocation->data, allocation->size, 0xD5);
  allocation->state = MemoryState::freed;
  if (allocation->kind == MemoryKind::device) used -= allocation->size;
  quarantine.push_back(allocation);
  if (quarantine.size() > kQuarantine) forget_oldest();
}

Allocation* find_allocation(uintptr_t address) {
  auto above = allocations.upper_bound(address);
  if (above == allocations.begin()) return nullptr;
  Allocation* found = std::prev(above)->second;
  return address < found->end() || address == found->begin() ? found : nullptr;
}

bool is_device(uintptr_t address) {
  Allocation* found = find_allocation(address);
  return found && found->kind == MemoryKind::device;
}

bool is_pinned(uintptr_t address) {
  Allocation* found = find_allocation(address);
  return found && found->kind == MemoryKind::pinned;
}

bool in_live_memory(uintptr_t address, size_t size) {
  Allocation* found = find_allocation(address);
  return found && found->state == MemoryState::live && address + size <= found->end();
}

bool live_segment(uint64_t address, unsigned size, Segment* out) {
  if (!in_live_memory(address, size)) return false;
  Allocation* found = find_allocation(address);
  *out = {address >> 12, found->begin(), found->end()};
  return true;
}

std::string describe(uintptr_t address) {
  Allocation* near = nearest(address);
  if (!near) {
    char text[64];
    std::snprintf(text, sizeof text, "address %#zx, in no allocation", size_t(address));
    return text;
  }
  return state_prefix(*near) + place(*near, address) + " " + label(*near);
}

size_t device_bytes_used() { return used; }
size_t device_bytes_total() { return total; }
void set_device_bytes_total(size_t bytes) { total = bytes; }

std::string leak_report(int* count) {
  std::string text;
  *count = 0;
  for (const auto& [address, allocation] : allocations) {
    if (allocation->state == MemoryState::freed) continue;
    ++*count;
    text += label(*allocation) + "\n";
  }
  return text;
}

}  // namespace cuda_double
