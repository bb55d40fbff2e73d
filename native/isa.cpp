#include "isa.h"

#include "kernel.h"

namespace genai {
namespace {

bool machine_has(const std::string& isa) {
  if (isa == "portable") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == "avx2") return avx2;
  if (isa == "avx512") return avx512;
  if (isa == "avx512vnni") {
    return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  }
#elif defined(__aarch64__)
  if (isa == "neon") return true;
#endif
  return false;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> isas;
  for (const char* isa : {"portable", "neon", "avx2", "avx512", "avx512vnni"}) {
    if (machine_has(isa) && !kernel_names(isa).empty()) isas.emplace_back(isa);
  }
  return isas;
}

}  // namespace genai
