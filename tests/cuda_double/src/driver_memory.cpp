// Memory, copies, and stream-ordered allocation.
#include "entry.h"

namespace cuda_double {
namespace {

int default_pool;  // its address is the handle
cuuint64_t release_threshold = 0;

CUresult give(CUdeviceptr* out, size_t size, MemoryKind kind, const char* origin) {
  REFUSE_IF(!out || !size);
  Allocation* made = allocate(size, kind, origin, true);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = made->begin();
  return CUDA_SUCCESS;
}

CUresult copy_and_wait(CUdeviceptr to, CUdeviceptr from, size_t size) {
  if (CUresult busy = refuse_while_capturing()) return busy;
  if (CUresult refused = copy(to, from, size, nullptr)) return refused;
  return synchronize(nullptr);
}

CUdeviceptr bits(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

Allocation* live_at(CUdeviceptr address) {
  Allocation* found = find_allocation(address);
  return found && found->begin() == address && found->state != MemoryState::freed ? found : nullptr;
}

CUresult attribute_of(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  Allocation* found = find_allocation(address);
  if (found && found->state == MemoryState::freed) found = nullptr;
  bool device = found && found->kind == MemoryKind::device;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) = !found ? 0 : device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(out) = found ? address : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<int*>(out) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(out) = found ? 0 : -2;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

ENTRY(cuMemGetInfo, 3020, size_t* free, size_t* total) {
  NEEDS_CONTEXT;
  *total = device_bytes_total();
  *free = device_bytes_total() - device_bytes_used();
  return CUDA_SUCCESS;
}
ENTRY(cuMemAlloc, 3020, CUdeviceptr* out, size_t size) {
  NEEDS_CONTEXT;
  if (CUresult busy = refuse_while_capturing()) return busy;
  return give(out, size, MemoryKind::device, "cuMemAlloc");
}
// As the driver's, it waits for the device.
ENTRY(cuMemFree, 3020, CUdeviceptr address) {
  NEEDS_CONTEXT;
  if (!address) return CUDA_SUCCESS;
  if (CUresult busy = refuse_while_capturing()) return busy;
  Allocation* found = live_at(address);
  REFUSE_IF(!found || found->kind != MemoryKind::device);
  synchronize_all();
  release(found);
  return CUDA_SUCCESS;
}
ENTRY(cuMemAllocHost, 3020, void** out, size_t size) {
  NEEDS_CONTEXT;
  return give(reinterpret_cast<CUdeviceptr*>(out), size, MemoryKind::pinned, "cuMemAllocHost");
}
ENTRY(cuMemHostAlloc, 2020, void** out, size_t size, unsigned) {
  NEEDS_CONTEXT;
  return give(reinterpret_cast<CUdeviceptr*>(out), size, MemoryKind::pinned, "cuMemHostAlloc");
}
ENTRY(cuMemFreeHost, 2000, void* pointer) {
  NEEDS_DRIVER;
  Allocation* found = live_at(bits(pointer));
  REFUSE_IF(!found || found->kind != MemoryKind::pinned);
  settle_host_range(found->begin(), found->end());
  release(found);
  return CUDA_SUCCESS;
}
ENTRY(cuPointerGetAttribute, 4000, void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  NEEDS_CONTEXT;
  return attribute_of(out, attribute, address);
}
ENTRY(cuPointerGetAttributes, 7000, unsigned count, CUpointer_attribute* attributes, void** out, CUdeviceptr address) {
  NEEDS_CONTEXT;
  for (unsigned i = 0; i < count; ++i) {
    if (CUresult refused = attribute_of(out[i], attributes[i], address)) return refused;
  }
  return CUDA_SUCCESS;
}

ENTRY(cuMemcpy, 4000, CUdeviceptr to, CUdeviceptr from, size_t size) {
  NEEDS_CONTEXT;
  return copy_and_wait(to, from, size);
}
ENTRY(cuMemcpyHtoD, 3020, CUdeviceptr to, const void* from, size_t size) {
  NEEDS_CONTEXT;
  return copy_and_wait(to, bits(from), size);
}
ENTRY(cuMemcpyDtoH, 3020, void* to, CUdeviceptr from, size_t size) {
  NEEDS_CONTEXT;
  return copy_and_wait(bits(to), from, size);
}
ENTRY(cuMemcpyAsync, 4000, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  NEEDS_CONTEXT;
  return copy(to, from, size, stream);
}
ENTRY(cuMemcpyHtoDAsync, 3020, CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  NEEDS_CONTEXT;
  return copy(to, bits(from), size, stream);
}
ENTRY(cuMemcpyDtoHAsync, 3020, void* to, CUdeviceptr from, size_t size, CUstream stream) {
  NEEDS_CONTEXT;
  return copy(bits(to), from, size, stream);
}
ENTRY(cuMemcpyDtoDAsync, 3020, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  NEEDS_CONTEXT;
  return copy(to, from, size, stream);
}
ENTRY(cuMemsetD8Async, 3020, CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
  NEEDS_CONTEXT;
  return fill(to, value, size, stream);
}

// The address is known at once, the memory exists only when the stream gets there.
ENTRY(cuMemAllocFromPoolAsync, 11020, CUdeviceptr* out, size_t size, CUmemoryPool, CUstream stream) {
  NEEDS_CONTEXT;
  REFUSE_IF(!out || !size);
  CUstream target = resolve(stream);
  if (!target) return CUDA_ERROR_INVALID_HANDLE;
  if (target->capture) {
    report("allocation inside a captured graph: the double does not know it");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Allocation* made = allocate(size, MemoryKind::device, "stream-ordered pool", false);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = made->begin();
  return enqueue(stream, [made] {
    make_live(made);
    return CUDA_SUCCESS;
  });
}
ENTRY(cuMemFreeAsync, 11020, CUdeviceptr address, CUstream stream) {
  NEEDS_DRIVER;
  if (!address) return CUDA_SUCCESS;
  Allocation* found = live_at(address);
  REFUSE_IF(!found || found->kind != MemoryKind::device);
  return enqueue(stream, [found]() -> CUresult {
    if (found->state == MemoryState::freed) return CUDA_ERROR_INVALID_VALUE;
    release(found);
    return CUDA_SUCCESS;
  });
}
ENTRY(cuDeviceGetMemPool, 11020, CUmemoryPool* pool, CUdevice) {
  *pool = reinterpret_cast<CUmemoryPool>(&default_pool);
  return CUDA_SUCCESS;
}
ENTRY(cuDeviceGetDefaultMemPool, 11020, CUmemoryPool* pool, CUdevice) {
  *pool = reinterpret_cast<CUmemoryPool>(&default_pool);
  return CUDA_SUCCESS;
}
ENTRY(cuMemPoolGetAttribute, 11020, CUmemoryPool, CUmemPool_attribute attribute, void* value) {
  NEEDS_DRIVER;
  if (attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES) {
    *static_cast<int*>(value) = 1;
  } else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
    *static_cast<cuuint64_t*>(value) = release_threshold;
  } else {
    *static_cast<cuuint64_t*>(value) = device_bytes_used();
  }
  return CUDA_SUCCESS;
}
ENTRY(cuMemPoolSetAttribute, 11020, CUmemoryPool, CUmemPool_attribute attribute, void* value) {
  NEEDS_DRIVER;
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) release_threshold = *static_cast<cuuint64_t*>(value);
  return CUDA_SUCCESS;
}
ENTRY(cuMemPoolTrimTo, 11020, CUmemoryPool, size_t) { return CUDA_SUCCESS; }

}  // namespace cuda_double
