// Run-time part of a kernel library that translate.py made from PTX. Registers are raw bits; every access is checked.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "abi.h"

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

constexpr int kIllegalAddress = 700, kMisaligned = 716, kLaunchFailed = 719;

static const cuda_double::Services* services;
static cuda_double::KernelEntry* kernels;
static cuda_double::Block* block;

extern "C" __attribute__((visibility("default"))) cuda_double::KernelEntry* cuda_double_kernels(
    const cuda_double::Services* given) {
  services = given;
  block = given->block;
  return kernels;
}

struct Registered {
  cuda_double::KernelEntry entry;
  Registered(const char* name, void (*run)(void**), const size_t* sizes, unsigned count, size_t shared,
             unsigned max_threads)
      : entry{name, run, sizes, count, shared, max_threads, kernels} {
    kernels = &entry;
  }
};

static inline const cuda_double::Thread& self() { return **services->thread; }

[[noreturn]] static void fail(int error, const char* message) {
  services->fail(error, message);
  __builtin_unreachable();
}

template <class To, class From>
static inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  memcpy(&out, &value, sizeof out);
  return out;
}

// ---- 16-bit floats, round to nearest even
static inline f32 from_f16(u16 half) {
  u32 sign = u32(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 31) return bits<f32>(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return std::copysign(f32(mantissa) * 0x1p-24f, bits<f32>(sign | 0x3f800000));
  return bits<f32>(sign | (exponent + 112) << 23 | mantissa << 13);
}
static inline u16 to_f16(f32 value) {
  u32 raw = bits<u32>(value), sign = raw >> 16 & 0x8000, magnitude = raw & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x47800000) return u16(sign | 0x7c00);
  if (magnitude < 0x38800000) return u16(sign | (bits<u32>(bits<f32>(magnitude) + 0.5f) - 0x3f000000));  // subnormal
  magnitude += 0xc8000fff + (magnitude >> 13 & 1);
  return u16(sign | magnitude >> 13);
}
static inline f32 from_bf16(u16 value) { return bits<f32>(u32(value) << 16); }
static inline u16 to_bf16(f32 value) {
  u32 raw = bits<u32>(value);
  if ((raw & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return u16((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
}

static inline f32 saturate(f32 value) { return value > 0 ? std::min(value, 1.f) : 0.f; }
static inline f32 flush(f32 value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.f, value) : value;
}

// Conversions clamp, and NaN becomes 0, as PTX says.
template <class I, class F>
static inline I to_integer(F value) {
  if (value != value) return 0;
  if (value <= F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  if (value >= F(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  return I(value);
}

// ---- memory
alignas(16) extern const u8 module_memory[];
extern const u64 module_memory_size;

static inline bool in_module(u64 address, unsigned size) {
  u64 begin = reinterpret_cast<u64>(module_memory);
  return address >= begin && address + size <= begin + module_memory_size;
}

template <class T, unsigned N = 1>
static inline T* memory(u64 address) {
  if (address & (sizeof(T) * N - 1)) fail(kMisaligned, "misaligned address");
  cuda_double::Segment& seen = block->segments[address >> 12 & 63];
  bool known = seen.page == address >> 12 && address >= seen.begin && address + sizeof(T) * N <= seen.end;
  if (!known && !in_module(address, sizeof(T) * N)) services->check(address, sizeof(T) * N, &seen);
  return reinterpret_cast<T*>(address);
}

// Shared addresses are offsets into the block's area.
template <class T, unsigned N = 1>
static inline T* shared(u64 offset) {
  if (offset & (sizeof(T) * N - 1)) fail(kMisaligned, "misaligned shared-memory address");
  if (offset + sizeof(T) * N > block->shared_size) fail(kIllegalAddress, "shared memory accessed past its end");
  return reinterpret_cast<T*>(block->shared + offset);
}

// ---- warps
enum class Shuffle { up, down, bfly, idx };

static inline u32 shuffle(u32 mask, u32 value, u32 by, u32 control, Shuffle mode, bool* in_range) {
  auto result = services->exchange(mask, value);
  int lane = int(self().lane), segment = int(control >> 8 & 31), clamp = int(control & 31);
  int last = (lane & segment) | (clamp & ~segment), first = lane & segment, b = int(by & 31), source = lane;
  bool valid = false;
  switch (mode) {
    case Shuffle::up:
      source = lane - b, valid = source >= last;
      break;
    case Shuffle::down:
      source = lane + b, valid = source <= last;
      break;
    case Shuffle::bfly:
      source = lane ^ b, valid = source <= last;
      break;
    case Shuffle::idx:
      source = first | (b & ~segment), valid = source <= last;
      break;
  }
  if (in_range) *in_range = valid;
  return u32(result.values[(valid ? source : lane) & 31]);
}

static inline u32 ballot(u32 mask, bool vote) {
  auto result = services->exchange(mask, vote);
  u32 found = 0;
  for (int i = 0; i < 32; ++i) found |= u32(result.active >> i & 1 && result.values[i]) << i;
  return found;
}
static inline bool vote_any(u32 mask, bool vote) { return ballot(mask, vote) != 0; }
static inline bool vote_all(u32 mask, bool vote) { return ballot(mask, !vote) == 0; }

// mma.m16n8k16: sums [16, 8] += a [16, 16] b [16, 8]. Lane 4 g + t holds rows g and g + 8 of a, column g of b, columns
// 2 t and 2 t + 1 of the sums, and of K the pairs at 2 t and 2 t + 8.
template <bool BRAIN>
static inline void tensor_product(f32* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto gather = [](u64 value, u64* to) { memcpy(to, services->exchange(~0u, value).values, 32 * sizeof(u64)); };
  u64 low[32], high[32], right[32];  // rows g and g + 8 at 2 t; the same at 2 t + 8; the column at both
  gather(u64(a1) << 32 | a0, low), gather(u64(a3) << 32 | a2, high), gather(u64(b1) << 32 | b0, right);
  auto value = [](u64 word, int at) {
    u16 half = u16(word >> at);
    return BRAIN ? from_bf16(half) : from_f16(half);
  };
  int lane = int(self().lane), g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    int column = 2 * t + i % 2, row = i / 2 * 32;
    for (int k = 0; k < 16; ++k) {
      int holder = k % 8 / 2, odd = k % 2 * 16;
      f32 left = value((k < 8 ? low : high)[4 * g + holder], row + odd);
      sums[i] = std::fma(left, value(right[4 * column + holder], (k < 8 ? 0 : 32) + odd), sums[i]);
    }
  }
}

// ---- integer instructions
static inline u32 permute(u32 a, u32 b, u32 selector) {
  u64 all = u64(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    u32 pick = selector >> 4 * i & 15, byte = u32(all >> 8 * (pick & 7)) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}
static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 out = 0;
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return out;
}
template <class A, class B>
static inline s32 dot4(u32 a, u32 b, s32 sum) {
  for (int i = 0; i < 4; ++i) sum += s32(A(a >> 8 * i)) * s32(B(b >> 8 * i));
  return sum;
}
template <class T>
static inline T extract(T value, u32 position, u32 length) {
  using U = std::make_unsigned_t<T>;
  u32 width = sizeof(T) * 8;
  position &= 255, length &= 255;
  if (!length) return 0;
  return T(U(value) << (width - std::min(width, position + length))) >> (width - std::min(width, length));
}
template <class T>
static inline T insert(T value, T into, u32 position, u32 length) {
  T mask = T((length >= sizeof(T) * 8 ? T(~T(0)) : T((T(1) << length) - 1)) << position);
  return T((T(value << position) & mask) | (into & ~mask));
}
template <class T>
static inline T reverse_bits(T value) {
  T out = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; ++i) out |= T(value >> i & 1) << (sizeof(T) * 8 - 1 - i);
  return out;
}
template <class T>
static inline T shift_left(T value, u32 by) {
  return by >= sizeof(T) * 8 ? T(0) : T(value << by);
}
template <class T>  // arithmetic for signed types
static inline T shift_right(T value, u32 by) {
  if (by >= sizeof(T) * 8) return std::is_signed_v<T> && value < 0 ? T(-1) : T(0);
  return T(value >> by);
}
static inline u32 funnel(u32 low, u32 high, u32 by, bool right) {
  u64 both = u64(high) << 32 | low;
  return right ? u32(both >> by) : u32(both << by >> 32);
}
