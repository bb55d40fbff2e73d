// Errors, initialisation, the one device, contexts, and the doors through which the libraries find all this.
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "entry.h"

namespace cuda_double {

std::recursive_mutex lock;
CUresult sticky_error = CUDA_SUCCESS;
bool initialised = false;

namespace {

std::vector<std::string> reports;
EntryPoint* entry_points = nullptr;
thread_local std::vector<CUcontext> contexts;
int primary_references = 0;
int primary;  // its address is the handle

CUcontext primary_context() { return reinterpret_cast<CUcontext>(&primary); }

}  // namespace

void report(const std::string& message) { reports.push_back(message); }

std::string take_reports() {
  std::string text;
  for (const std::string& message : reports) text += message + "\n";
  reports.clear();
  return text;
}

EntryPoint::EntryPoint(const char* name, int version, void* function)
    : name(name), version(version), function(function), next(entry_points) {
  entry_points = this;
}

void* find_entry_point(const char* name, int version) {
  EntryPoint* best = nullptr;
  for (EntryPoint* entry = entry_points; entry; entry = entry->next) {
    bool fits = !std::strcmp(entry->name, name) && entry->version <= version;
    if (fits && (!best || entry->version > best->version)) best = entry;
  }
  return best ? best->function : nullptr;
}

CUcontext current_context() { return contexts.empty() ? nullptr : contexts.back(); }

#define ERRORS(X)                                                                                                 \
  X(SUCCESS)                                                                                                      \
  X(INVALID_VALUE) X(OUT_OF_MEMORY) X(NOT_INITIALIZED) X(DEINITIALIZED) X(NO_DEVICE) X(INVALID_DEVICE)            \
      X(INVALID_IMAGE) X(INVALID_CONTEXT) X(NO_BINARY_FOR_GPU) X(UNSUPPORTED_LIMIT) X(INVALID_PTX)                \
          X(UNSUPPORTED_PTX_VERSION) X(INVALID_SOURCE) X(FILE_NOT_FOUND) X(INVALID_HANDLE) X(ILLEGAL_STATE)       \
              X(NOT_FOUND) X(NOT_READY) X(ILLEGAL_ADDRESS) X(LAUNCH_OUT_OF_RESOURCES) X(LAUNCH_TIMEOUT) X(ASSERT) \
                  X(ILLEGAL_INSTRUCTION) X(MISALIGNED_ADDRESS) X(LAUNCH_FAILED) X(NOT_PERMITTED) X(NOT_SUPPORTED) \
                      X(SYSTEM_DRIVER_MISMATCH) X(STREAM_CAPTURE_UNSUPPORTED) X(STREAM_CAPTURE_INVALIDATED)       \
                          X(STREAM_CAPTURE_MERGE) X(STREAM_CAPTURE_UNMATCHED) X(STREAM_CAPTURE_UNJOINED)          \
                              X(STREAM_CAPTURE_ISOLATION) X(STREAM_CAPTURE_IMPLICIT) X(CAPTURED_EVENT) X(UNKNOWN)

ENTRY(cuGetErrorName, 6000, CUresult error, const char** name) {
#define NAME_OF(code)            \
  case CUDA_ERROR_##code:        \
    *name = "CUDA_ERROR_" #code; \
    return CUDA_SUCCESS;
#define CUDA_ERROR_SUCCESS CUDA_SUCCESS
  switch (error) {
    ERRORS(NAME_OF)
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}
ENTRY(cuGetErrorString, 6000, CUresult error, const char** text) { return cuGetErrorName_at_6000(error, text); }

// A driver that is too old for the toolkit can be imitated.
ENTRY(cuDriverGetVersion, 2020, int* version) {
  *version = int(option_number("CUDA_DOUBLE_DRIVER_VERSION", CUDA_VERSION));
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetCount, 2000, int* count) {
  NEEDS_DRIVER;
  *count = int(option_number("CUDA_DOUBLE_DEVICES", 1));
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGet, 2000, CUdevice* device, int ordinal) {
  NEEDS_DRIVER;
  if (ordinal) return CUDA_ERROR_INVALID_DEVICE;
  *device = 0;
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetName, 2000, char* name, int size, CUdevice) {
  std::snprintf(name, size_t(size), "CPU double of a CUDA device");
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetUuid, 11040, CUuuid* uuid, CUdevice) {
  std::memset(uuid, 0xDB, sizeof *uuid);
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceTotalMem, 3020, size_t* bytes, CUdevice) {
  *bytes = device_bytes_total();
  return CUDA_SUCCESS;
}

ENTRY(cuDeviceGetAttribute, 2000, int* value, CUdevice_attribute attribute, CUdevice device) {
  NEEDS_DRIVER;
  if (device) return CUDA_ERROR_INVALID_DEVICE;
  static const std::map<int, int> values = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},  // few: grids sized by it stay cheap here
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
  };
  auto known = values.find(attribute);
  *value = known == values.end() ? 0 : known->second;
  return CUDA_SUCCESS;
}

ENTRY(cuDevicePrimaryCtxRetain, 7000, CUcontext* context, CUdevice device) {
  NEEDS_DRIVER;
  if (device) return CUDA_ERROR_INVALID_DEVICE;
  ++primary_references;
  *context = primary_context();
  return CUDA_SUCCESS;
}
ENTRY(cuDevicePrimaryCtxRelease, 11000, CUdevice) {
  NEEDS_DRIVER;
  if (primary_references <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  --primary_references;
  return CUDA_SUCCESS;
}
ENTRY(cuCtxGetCurrent, 4000, CUcontext* context) {
  NEEDS_DRIVER;
  *context = current_context();
  return CUDA_SUCCESS;
}
ENTRY(cuCtxSetCurrent, 4000, CUcontext context) {
  NEEDS_DRIVER;
  if (!contexts.empty()) contexts.pop_back();
  if (context) contexts.push_back(context);
  return CUDA_SUCCESS;
}
ENTRY(cuCtxPushCurrent, 4000, CUcontext context) {
  NEEDS_DRIVER;
  REFUSE_IF(!context);
  contexts.push_back(context);
  return CUDA_SUCCESS;
}
ENTRY(cuCtxPopCurrent, 4000, CUcontext* context) {
  NEEDS_DRIVER;
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
ENTRY(cuCtxGetDevice, 2000, CUdevice* device) {
  NEEDS_DRIVER;
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = 0;
  return CUDA_SUCCESS;
}
ENTRY(cuCtxGetDevice, 13000, CUdevice* device, CUcontext) {
  NEEDS_DRIVER;
  *device = 0;
  return CUDA_SUCCESS;
}
ENTRY(cuCtxGetStreamPriorityRange, 5050, int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}
ENTRY(cuCtxSynchronize, 2000) {
  NEEDS_CONTEXT;
  if (CUresult busy = refuse_while_capturing()) return busy;
  return synchronize_all();
}

}  // namespace cuda_double

#define EXPORT extern "C" __attribute__((visibility("default")))
#undef cuGetProcAddress

EXPORT CUresult cuInit(unsigned flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (cuda_double::option_number("CUDA_DOUBLE_DEVICES", 1) == 0) return CUDA_ERROR_NO_DEVICE;
  cuda_double::initialised = true;
  return CUDA_SUCCESS;
}

// NVRTC looks for private tables by itself, and goes on without them.
EXPORT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t,
                                    CUdriverProcAddressQueryResult* status) {
  using namespace cuda_double;
  std::string wanted = name;
  *function = wanted == "cuInit"             ? reinterpret_cast<void*>(cuInit)
              : wanted == "cuGetExportTable" ? reinterpret_cast<void*>(cuGetExportTable)
              : wanted == "cuGetProcAddress" ? reinterpret_cast<void*>(cuGetProcAddress_v2)
                                             : find_entry_point(name, version);
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- for the tests
EXPORT int cuda_double_leaks(char* text, size_t size) {
  std::lock_guard guard(cuda_double::lock);
  cuda_double::synchronize_all();
  int count = 0;
  std::snprintf(text, size, "%s", cuda_double::leak_report(&count).c_str());
  return count;
}
EXPORT void cuda_double_reports(char* text, size_t size) {
  std::lock_guard guard(cuda_double::lock);
  std::snprintf(text, size, "%s", cuda_double::take_reports().c_str());
}
EXPORT void cuda_double_clear_error() { cuda_double::sticky_error = CUDA_SUCCESS; }
EXPORT void cuda_double_set_memory(size_t bytes) { cuda_double::set_device_bytes_total(bytes); }
EXPORT size_t cuda_double_memory_used() { return cuda_double::device_bytes_used(); }
