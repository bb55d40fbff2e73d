#include "kernel.h"

#include <algorithm>
#include <cstring>

#include "dtype.h"

extern "C" {
// Set by the linker around the section that GENAI_KERNEL fills.
extern const genai::KernelEntry __start_genai_kernels[] __attribute__((visibility("hidden")));
extern const genai::KernelEntry __stop_genai_kernels[] __attribute__((visibility("hidden")));
}

namespace genai {
namespace {

struct DTypeRow {
  DType dtype;
  const char* name;
  int64_t size;
};

constexpr DTypeRow kDTypes[] = {{DType::f32, "float32", 4}, {DType::f16, "float16", 2}, {DType::bf16, "bfloat16", 2},
                                {DType::f64, "float64", 8}, {DType::i8, "int8", 1},     {DType::u8, "uint8", 1},
                                {DType::i16, "int16", 2},   {DType::u16, "uint16", 2},  {DType::i32, "int32", 4},
                                {DType::u32, "uint32", 4},  {DType::i64, "int64", 8},   {DType::u64, "uint64", 8},
                                {DType::boolean, "bool", 1}};

template <class T>
T typed(const Args& args, const std::string& name, T fallback, const char* wanted) {
  auto found = args.attrs.find(name);
  if (found == args.attrs.end()) return fallback;
  if (auto* value = std::get_if<T>(&found->second)) return *value;
  throw std::invalid_argument("attribute `" + name + "` must be " + wanted);
}

}  // namespace

int64_t Args::integer(const std::string& name, int64_t fallback) const {
  return typed<int64_t>(*this, name, fallback, "an integer");
}

double Args::real(const std::string& name, double fallback) const {
  auto found = attrs.find(name);
  if (found != attrs.end() && std::holds_alternative<int64_t>(found->second)) {
    return static_cast<double>(std::get<int64_t>(found->second));
  }
  return typed<double>(*this, name, fallback, "a number");
}

std::string Args::text(const std::string& name, const std::string& fallback) const {
  return typed<std::string>(*this, name, fallback, "a string");
}

std::vector<int64_t> Args::integers(const std::string& name) const {
  return typed<std::vector<int64_t>>(*this, name, {}, "a list of integers");
}

Factory find_kernel(const std::string& isa, const std::string& name) {
  for (auto* entry = __start_genai_kernels; entry != __stop_genai_kernels; ++entry) {
    if (name == entry->name && isa == entry->isa) return entry->factory;
  }
  return nullptr;
}

std::vector<std::string> kernel_names(const std::string& isa) {
  std::vector<std::string> names;
  for (auto* entry = __start_genai_kernels; entry != __stop_genai_kernels; ++entry) {
    if (isa == entry->isa) names.emplace_back(entry->name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

int64_t size_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].size; }
const char* name_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }

DType dtype_from(const std::string& name) {
  for (const auto& row : kDTypes) {
    if (name == row.name) return row.dtype;
  }
  // 4-bit integers travel unpacked, one value in a byte.
  if (name == "int4") return DType::i8;
  if (name == "uint4") return DType::u8;
  throw std::invalid_argument("dtype `" + name + "` has no kernels");
}

std::string describe(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string describe(const Tensor& tensor) {
  return tensor ? std::string(name_of(tensor.dtype)) + describe(tensor.shape) : "missing";
}

}  // namespace genai
