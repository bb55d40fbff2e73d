// Streams, events, images, launches, capture and graphs.
#include <algorithm>
#include <set>

#include "entry.h"
#include "modules.h"

namespace cuda_double {
namespace {

std::set<CUgraph> graphs;
std::set<CUgraphExec> executables;

CUkern_st* own(CUfunction function) { return reinterpret_cast<CUkern_st*>(function); }
CUkern_st* own(CUkernel kernel) { return reinterpret_cast<CUkern_st*>(kernel); }

CUresult launch(CUfunction function, Dim3 grid, Dim3 block, unsigned shared, CUstream stream, void** arguments) {
  std::shared_ptr<Launch> made;
  if (CUresult refused = prepare_launch(own(function), grid, block, shared, arguments, &made)) return refused;
  return enqueue(stream, [made] { return run_launch(*made); });
}

void drop(CUuserObject object, int count) {
  object->references -= count;
  if (object->references > 0) return;
  object->destroy(object->object);
  delete object;
}

void drop_all(const std::vector<ObjectCount>& objects) {
  for (const ObjectCount& held : objects) drop(held.object, held.count);
}

void destroy_graph(CUgraph graph) {
  graphs.erase(graph);
  drop_all(graph->objects);
  delete graph;
}

CUstreamCaptureStatus capture_status(CUstream stream) {
  if (!stream->capture) return CU_STREAM_CAPTURE_STATUS_NONE;
  return stream->capture_broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult instantiate(CUgraphExec* out, CUgraph graph) {
  REFUSE_IF(!graphs.count(graph));
  auto* made = new CUgraphExec_st{graph->nodes, graph->objects};
  for (const ObjectCount& held : made->objects) held.object->references += held.count;
  executables.insert(made);
  *out = made;
  return CUDA_SUCCESS;
}

}  // namespace

#define STREAM(name, handle)       \
  CUstream name = resolve(handle); \
  if (!name) return CUDA_ERROR_INVALID_HANDLE

// ---- streams and events
ENTRY(cuStreamCreateWithPriority, 5050, CUstream* out, unsigned flags, int priority) {
  NEEDS_CONTEXT;
  *out = create_stream(flags, priority);
  return CUDA_SUCCESS;
}
ENTRY(cuStreamCreate, 2000, CUstream* out, unsigned flags) {
  NEEDS_CONTEXT;
  *out = create_stream(flags, 0);
  return CUDA_SUCCESS;
}
ENTRY(cuStreamDestroy, 4000, CUstream stream) {
  NEEDS_DRIVER;
  return destroy_stream(stream);
}
ENTRY(cuStreamSynchronize, 2000, CUstream stream) {
  NEEDS_CONTEXT;
  return synchronize(stream);
}
ENTRY(cuStreamGetCtx, 9020, CUstream, CUcontext* context) {
  NEEDS_CONTEXT;
  *context = current_context();
  return CUDA_SUCCESS;
}
ENTRY(cuStreamGetFlags, 5050, CUstream handle, unsigned* flags) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  *flags = stream->flags;
  return CUDA_SUCCESS;
}
ENTRY(cuStreamGetPriority, 5050, CUstream handle, int* priority) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  *priority = stream->priority;
  return CUDA_SUCCESS;
}
ENTRY(cuStreamGetId, 12000, CUstream handle, unsigned long long* id) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  *id = stream->id;
  return CUDA_SUCCESS;
}
ENTRY(cuStreamWaitEvent, 3020, CUstream handle, CUevent event, unsigned) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  if (!is_event(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) {
    stream->capture_broken = true;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  OperationPtr recorded = event->recorded;
  if (!recorded || recorded->done) return CUDA_SUCCESS;
  CUresult queued = enqueue(stream, nullptr);
  stream->tail->needs.push_back(recorded);
  return queued;
}
ENTRY(cuEventCreate, 2000, CUevent* out, unsigned flags) {
  NEEDS_CONTEXT;
  *out = create_event(flags);
  return CUDA_SUCCESS;
}
ENTRY(cuEventDestroy, 4000, CUevent event) {
  NEEDS_DRIVER;
  return destroy_event(event);
}
ENTRY(cuEventRecord, 2000, CUevent event, CUstream handle) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  if (!is_event(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) {
    report("an event inside a captured graph: the double does not know it");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  CUresult queued = enqueue(stream, nullptr);
  event->recorded = stream->tail;
  return queued;
}
ENTRY(cuEventSynchronize, 2000, CUevent event) {
  NEEDS_CONTEXT;
  if (!is_event(event)) return CUDA_ERROR_INVALID_HANDLE;
  force(event->recorded);
  return sticky_error;
}
ENTRY(cuEventQuery, 2000, CUevent event) {
  NEEDS_CONTEXT;
  if (!is_event(event)) return CUDA_ERROR_INVALID_HANDLE;
  return !event->recorded || event->recorded->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
ENTRY(cuEventElapsedTime, 12080, float* ms, CUevent from, CUevent to) {
  NEEDS_CONTEXT;
  if (!is_event(from) || !is_event(to) || !from->recorded || !to->recorded) return CUDA_ERROR_INVALID_HANDLE;
  if (!from->recorded->done || !to->recorded->done) return CUDA_ERROR_NOT_READY;
  *ms = float(to->recorded->finished_ms - from->recorded->finished_ms);
  return CUDA_SUCCESS;
}

// ---- images and kernels
ENTRY(cuLibraryLoadData, 12000, CUlibrary* out, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*,
      void**, unsigned) {
  NEEDS_CONTEXT;
  return load_image(image, out);
}
ENTRY(cuLibraryUnload, 12000, CUlibrary library) {
  NEEDS_DRIVER;
  return unload(library);
}
ENTRY(cuLibraryGetKernel, 12000, CUkernel* out, CUlibrary library, const char* name) {
  NEEDS_CONTEXT;
  *out = reinterpret_cast<CUkernel>(find_kernel(library, name));
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
ENTRY(cuKernelGetParamInfo, 12040, CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  NEEDS_CONTEXT;
  const KernelEntry& entry = *own(kernel)->entry;
  REFUSE_IF(index >= entry.num_parameters);
  size_t at = 0;
  for (size_t i = 0; i <= index; ++i) {
    at = (at + entry.sizes[i] - 1) / entry.sizes[i] * entry.sizes[i];  // scalars: aligned to their own size
    if (i < index) at += entry.sizes[i];
  }
  if (offset) *offset = at;
  if (size) *size = entry.sizes[index];
  return CUDA_SUCCESS;
}
ENTRY(cuKernelGetAttribute, 12000, int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice) {
  NEEDS_CONTEXT;
  const KernelEntry& entry = *own(kernel)->entry;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = entry.max_threads ? int(entry.max_threads) : 1024;
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = int(entry.static_shared);
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = own(kernel)->max_dynamic_shared;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}
ENTRY(cuKernelSetAttribute, 12000, CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
  NEEDS_CONTEXT;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) own(kernel)->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}
ENTRY(cuLaunchKernel, 4000, CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
      unsigned bz, unsigned shared, CUstream stream, void** arguments, void**) {
  NEEDS_CONTEXT;
  return launch(function, {gx, gy, gz}, {bx, by, bz}, shared, stream, arguments);
}
ENTRY(cuLaunchKernelEx, 11060, const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  NEEDS_CONTEXT;
  REFUSE_IF(!config);
  Dim3 grid{config->gridDimX, config->gridDimY, config->gridDimZ},
      block{config->blockDimX, config->blockDimY, config->blockDimZ};
  return launch(function, grid, block, config->sharedMemBytes, config->hStream, arguments);
}

// ---- capture and graphs
ENTRY(cuStreamBeginCapture, 10010, CUstream handle, CUstreamCaptureMode mode) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  if (stream == resolve(nullptr)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  stream->capture = new CUgraph_st;
  stream->capture_broken = false;
  stream->capture_mode = mode;
  graphs.insert(stream->capture);
  return CUDA_SUCCESS;
}
ENTRY(cuStreamEndCapture, 10000, CUstream handle, CUgraph* out) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  *out = stream->capture;
  stream->capture = nullptr;
  if (!stream->capture_broken) return CUDA_SUCCESS;
  destroy_graph(*out);
  *out = nullptr;
  return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}
ENTRY(cuStreamIsCapturing, 10000, CUstream handle, CUstreamCaptureStatus* status) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  *status = capture_status(stream);
  return CUDA_SUCCESS;
}
ENTRY(cuStreamGetCaptureInfo, 12030, CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
      const CUgraphNode** needs, const CUgraphEdgeData** edges, size_t* num_needs) {
  NEEDS_CONTEXT;
  STREAM(stream, handle);
  *status = capture_status(stream);
  if (id) *id = stream->id;
  if (graph) *graph = stream->capture;
  if (needs) *needs = nullptr;
  if (edges) *edges = nullptr;
  if (num_needs) *num_needs = 0;
  return CUDA_SUCCESS;
}
ENTRY(cuThreadExchangeStreamCaptureMode, 10010, CUstreamCaptureMode* mode) {
  static thread_local CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, current);
  return CUDA_SUCCESS;
}
ENTRY(cuGraphDestroy, 10000, CUgraph graph) {
  NEEDS_DRIVER;
  REFUSE_IF(!graphs.count(graph));
  destroy_graph(graph);
  return CUDA_SUCCESS;
}
ENTRY(cuGraphInstantiateWithFlags, 11040, CUgraphExec* out, CUgraph graph, unsigned long long) {
  NEEDS_CONTEXT;
  return instantiate(out, graph);
}
ENTRY(cuGraphInstantiateWithParams, 12000, CUgraphExec* out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
  NEEDS_CONTEXT;
  CUresult result = instantiate(out, graph);
  parameters->result_out = result ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
  parameters->hErrNode_out = nullptr;
  return result;
}
ENTRY(cuGraphUpload, 11010, CUgraphExec, CUstream) { return CUDA_SUCCESS; }
ENTRY(cuGraphLaunch, 10000, CUgraphExec graph, CUstream stream) {
  NEEDS_CONTEXT;
  if (!executables.count(graph)) return CUDA_ERROR_INVALID_HANDLE;
  return launch_graph(graph, stream);
}
ENTRY(cuGraphExecDestroy, 10000, CUgraphExec graph) {
  NEEDS_DRIVER;
  if (!executables.erase(graph)) return CUDA_ERROR_INVALID_HANDLE;
  drop_all(graph->objects);
  delete graph;
  return CUDA_SUCCESS;
}
ENTRY(cuUserObjectCreate, 11030, CUuserObject* out, void* object, CUhostFn destroy, unsigned references, unsigned) {
  NEEDS_CONTEXT;
  *out = new CUuserObject_st{object, destroy, int(references)};
  return CUDA_SUCCESS;
}
ENTRY(cuUserObjectRelease, 11030, CUuserObject object, unsigned count) {
  NEEDS_DRIVER;
  drop(object, int(count));
  return CUDA_SUCCESS;
}
ENTRY(cuGraphRetainUserObject, 11030, CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  NEEDS_CONTEXT;
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) object->references += int(count);
  graph->objects.push_back({object, int(count)});
  return CUDA_SUCCESS;
}
ENTRY(cuGraphReleaseUserObject, 11030, CUgraph graph, CUuserObject object, unsigned count) {
  NEEDS_DRIVER;
  auto held = std::find_if(graph->objects.begin(), graph->objects.end(), [=](auto& o) { return o.object == object; });
  REFUSE_IF(held == graph->objects.end());
  graph->objects.erase(held);
  drop(object, int(count));
  return CUDA_SUCCESS;
}

}  // namespace cuda_double
