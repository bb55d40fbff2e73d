// The order of work. Operations wait in their stream until something that depends on them is waited for ("lazy", the
// default: deterministic), or until a worker thread picks them after a random delay ("thread").
#pragma once

#include <cuda.h>

#include <functional>
#include <memory>
#include <vector>

#include "memory.h"

namespace cuda_double {

using Work = std::function<CUresult()>;

struct HostRange {
  uintptr_t begin = 0, end = 0;
  bool written = false;
};

struct Operation {
  std::vector<std::shared_ptr<Operation>> needs;
  std::vector<HostRange> host;
  Work work;
  bool done = false, busy = false;
  double finished_ms = 0;
};
using OperationPtr = std::shared_ptr<Operation>;

}  // namespace cuda_double

struct GraphNode {
  cuda_double::Work work;
  cuda_double::HostRange host;
};

struct CUuserObject_st {
  void* object;
  CUhostFn destroy;
  int references;
};

struct ObjectCount {
  CUuserObject object;
  int count;
};

// A captured graph is a list: one stream is captured, never a fork.
struct CUgraph_st {
  std::vector<GraphNode> nodes;
  std::vector<ObjectCount> objects;
};
struct CUgraphExec_st {
  std::vector<GraphNode> nodes;
  std::vector<ObjectCount> objects;
};

struct CUstream_st {
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  cuda_double::OperationPtr tail;
  CUgraph capture = nullptr;  // being recorded
  bool capture_broken = false;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

struct CUevent_st {
  unsigned flags = 0;
  cuda_double::OperationPtr recorded;
};

namespace cuda_double {

CUstream resolve(CUstream stream);  // null and the legacy handle are one stream; nullptr if unknown
CUstream create_stream(unsigned flags, int priority);
CUresult destroy_stream(CUstream stream);
bool is_event(CUevent event);
CUevent create_event(unsigned flags);
CUresult destroy_event(CUevent event);

// Queues work, or records it when the stream is being captured.
CUresult enqueue(CUstream stream, Work work, std::vector<HostRange> host = {});
void force(const OperationPtr& operation);  // runs it and all it needs, nothing else
CUresult synchronize(CUstream stream);
CUresult synchronize_all();
// During a global capture some calls are illegal: they break the capture and say so.
CUresult refuse_while_capturing();

CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
CUresult fill(CUdeviceptr to, unsigned char value, size_t size, CUstream stream);
CUresult launch_graph(CUgraphExec graph, CUstream stream);
// Work still queued on these host bytes: a freed staging buffer.
void settle_host_range(uintptr_t begin, uintptr_t end);

}  // namespace cuda_double
