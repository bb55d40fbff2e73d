// What a kernel is: a factory that checks its arguments once and returns a step to run many times.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace genai {

enum class DType : uint8_t { f32, f16, bf16, f64, i8, u8, i16, u16, i32, u32, i64, u64, boolean };

// A dense row-major tensor. Shapes are fixed when a step is recorded; only the bytes change between replays.
struct Tensor {
  void* data = nullptr;  // nullptr: an optional input that is missing
  DType dtype = DType::f32;
  std::vector<int64_t> shape;

  int64_t size() const {
    int64_t n = 1;
    for (int64_t dim : shape) n *= dim;
    return n;
  }
  explicit operator bool() const { return data != nullptr; }
};

using Attr = std::variant<int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

// One KV capacity buffer [num_heads, capacity, head_dim]; attention steps hold its index, never its address.
struct KvBuffer {
  void* data = nullptr;
  int64_t capacity = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  DType dtype = DType::f32;
};

// What one sequence holds: past_len tokens in buffers that all its attention steps find by their index.
struct Sequence {
  int64_t past_len = 0;
  std::vector<KvBuffer> kv;
};

// Read by kernels at run time, so that a recording depends neither on the position nor on buffer addresses.
struct State {
  std::shared_ptr<Sequence> now = std::make_shared<Sequence>();
  // Not empty: the tokens of a step belong to different sequences, token r is the next one of rows[r].
  std::vector<std::shared_ptr<Sequence>> rows;
};

class ThreadPool;  // threads.h

struct Args {
  std::vector<Tensor> in;   // ONNX input order
  std::vector<Tensor> out;  // ONNX output order; an unused output has data == nullptr
  std::map<std::string, Attr> attrs;

  // Typed attribute access with ONNX defaults; throws std::invalid_argument naming the attribute on a wrong type.
  int64_t integer(const std::string& name, int64_t fallback) const;
  double real(const std::string& name, double fallback) const;
  std::string text(const std::string& name, const std::string& fallback) const;
  std::vector<int64_t> integers(const std::string& name) const;
};

struct Context {
  ThreadPool& pool;
  State& state;
};

using Step = std::function<void(Context&)>;
using Factory = Step (*)(const Args&);

// One row of the kernel table. The rows are constant data in a section of their own, not static constructors: objects
// built for AVX-512 must execute nothing while the module loads on a machine without it. For the same reason kernels'
// files hold no globals that need a constructor. Size and alignment agree, so that the compiler cannot put gaps between
// the rows.
struct alignas(32) KernelEntry {
  const char* isa;
  const char* name;
  Factory factory;
};

#define GENAI_STRINGIFY_(x) #x
#define GENAI_STRINGIFY(x) GENAI_STRINGIFY_(x)
#define GENAI_CONCAT_(a, b) a##b
#define GENAI_CONCAT(a, b) GENAI_CONCAT_(a, b)

// Kernels register under their ONNX name, once per instruction set: each cpu/<family>.cpp is compiled once per ISA with
// GENAI_ISA (an identifier: portable, avx2, avx512, avx512vnni, neon) and lives in namespace genai::GENAI_ISA.
#define GENAI_KERNEL(name, factory)                                                                      \
  [[gnu::used, gnu::section("genai_kernels")]] static constinit const ::genai::KernelEntry GENAI_CONCAT( \
      registration_, __COUNTER__) = {GENAI_STRINGIFY(GENAI_ISA), name, factory}

// The factory of `name` for `isa`, or nullptr.
Factory find_kernel(const std::string& isa, const std::string& name);
std::vector<std::string> kernel_names(const std::string& isa);

}  // namespace genai
