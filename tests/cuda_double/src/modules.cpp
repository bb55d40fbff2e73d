#include "modules.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "state.h"
#include "streams.h"

namespace cuda_double {
namespace {

constexpr size_t kSharedOptIn = 232448;  // sm_90: 227 KiB
std::set<CUlibrary> libraries;

CUlib_st* own(CUlibrary library) { return reinterpret_cast<CUlib_st*>(library); }

uint64_t fnv1a(const std::string& text) {
  uint64_t hash = 1469598103934665603ull;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

// The shared library for a PTX text: built once, kept under the cache directory by the text's hash.
std::string build(const std::string& ptx) {
  char name[32];
  std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(fnv1a(ptx)));
  std::string base = option("CUDA_DOUBLE_CACHE", "/tmp") + "/" + name;
  std::string source = base + "." + std::to_string(getpid()) + ".ptx", library = base + ".so";
  if (access(library.c_str(), R_OK) == 0) return library;
  FILE* file = std::fopen(source.c_str(), "w");
  if (!file) return "";
  std::fwrite(ptx.data(), 1, ptx.size(), file);
  std::fclose(file);
  std::string command = option("CUDA_DOUBLE_TRANSLATE", "false") + " " + source + " " + library;
  int failed = std::system(command.c_str());
  std::remove(source.c_str());
  if (failed) report("the translation of PTX failed: " + command);
  return failed ? "" : library;
}

const KernelEntry* open_kernels(const std::string& path) {
  static std::map<std::string, const KernelEntry*> opened;
  auto known = opened.find(path);
  if (known != opened.end()) return known->second;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    report(std::string("dlopen: ") + dlerror());
    return nullptr;
  }
  auto kernels = reinterpret_cast<KernelsFunction>(dlsym(handle, "cuda_double_kernels"));
  return opened[path] = kernels ? kernels(executor_services()) : nullptr;
}

bool too_large(Dim3 grid, Dim3 block, const KernelEntry& entry) {
  bool none = !grid.volume() || !block.volume();
  bool grid_over = grid.y > 65535 || grid.z > 65535;
  bool block_over = block.x > 1024 || block.y > 1024 || block.z > 64 || block.volume() > 1024;
  return none || grid_over || block_over || (entry.max_threads && block.volume() > entry.max_threads);
}

bool too_much_shared(const CUkern_st& kernel, size_t dynamic) {
  size_t all = dynamic + kernel.entry->static_shared;
  bool asked_for = kernel.max_dynamic_shared > 48 << 10;
  return dynamic > size_t(kernel.max_dynamic_shared) || all > kSharedOptIn || (!asked_for && all > 48 << 10);
}

}  // namespace

CUresult load_image(const void* image, CUlibrary* out) {
  if (CUresult busy = refuse_while_capturing()) return busy;
  if (!image || !out) return CUDA_ERROR_INVALID_VALUE;
  if (!std::memcmp(image, "\177ELF", 4)) {
    report("a cubin was loaded: the double runs PTX only");
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  std::string ptx(static_cast<const char*>(image));
  if (ptx.find(".version") == std::string::npos) return CUDA_ERROR_INVALID_IMAGE;
  std::string path = build(ptx);
  const KernelEntry* entries = path.empty() ? nullptr : open_kernels(path);
  if (!entries) return CUDA_ERROR_INVALID_PTX;
  auto* made = new CUlib_st;
  *out = reinterpret_cast<CUlibrary>(made);
  for (const KernelEntry* entry = entries; entry; entry = entry->next) {
    made->kernels.push_back(std::make_unique<CUkern_st>(CUkern_st{entry, *out}));
  }
  libraries.insert(*out);
  return CUDA_SUCCESS;
}

CUresult unload(CUlibrary library) {
  if (!libraries.erase(library)) return CUDA_ERROR_INVALID_HANDLE;
  synchronize_all();
  delete own(library);
  return CUDA_SUCCESS;
}

CUkern_st* find_kernel(CUlibrary library, const std::string& name) {
  if (!libraries.count(library)) return nullptr;
  for (auto& kernel : own(library)->kernels) {
    if (name == kernel->entry->name) return kernel.get();
  }
  return nullptr;
}

CUresult prepare_launch(CUkern_st* kernel, Dim3 grid, Dim3 block, size_t dynamic_shared, void** arguments,
                        std::shared_ptr<Launch>* out) {
  if (!kernel || too_large(grid, block, *kernel->entry) || too_much_shared(*kernel, dynamic_shared)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const KernelEntry& entry = *kernel->entry;
  if (entry.num_parameters && !arguments) return CUDA_ERROR_INVALID_VALUE;
  auto launch = std::make_shared<Launch>();
  *launch = {&entry, grid, block, dynamic_shared, {}};
  for (unsigned i = 0; i < entry.num_parameters; ++i) {
    size_t offset = launch->arguments.size();
    launch->arguments.resize(offset + (entry.sizes[i] + 15) / 16 * 16);
    std::memcpy(launch->arguments.data() + offset, arguments[i], entry.sizes[i]);
  }
  *out = launch;
  return CUDA_SUCCESS;
}

CUresult run_launch(const Launch& launch) {
  std::string message;
  int result = run_grid(launch, &message);
  if (result) report(message);
  return CUresult(result);
}

}  // namespace cuda_double
