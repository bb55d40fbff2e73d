#include "streams.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "state.h"

namespace cuda_double {
namespace {

CUstream_st legacy;
std::set<CUstream> streams;
std::set<CUevent> events;
std::vector<OperationPtr> orphans;  // last operations of destroyed streams: they still run

bool threaded() {
  static const bool value = option("CUDA_DOUBLE_MODE", "lazy") == "thread";
  return value;
}

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

bool blocking(CUstream stream) { return !(stream->flags & CU_STREAM_NON_BLOCKING); }

void run(Operation& operation) {
  operation.busy = true;
  CUresult result = sticky_error ? sticky_error : operation.work ? operation.work() : CUDA_SUCCESS;
  operation.busy = false;
  operation.done = true;
  operation.finished_ms = now_ms();
  operation.work = nullptr;
  operation.needs.clear();
  if (result && !sticky_error) sticky_error = result;
}

OperationPtr first_unfinished_need(const Operation& operation) {
  for (const OperationPtr& need : operation.needs) {
    if (!need->done) return need;
  }
  return nullptr;
}

std::vector<OperationPtr> tails() {
  std::vector<OperationPtr> found(orphans);
  found.push_back(legacy.tail);
  for (CUstream stream : streams) found.push_back(stream->tail);
  return found;
}

bool touches(const OperationPtr& last, uintptr_t begin, uintptr_t end) {
  std::set<Operation*> seen;
  std::vector<OperationPtr> stack{last};
  while (!stack.empty()) {
    OperationPtr operation = stack.back();
    stack.pop_back();
    if (!operation || operation->done || !seen.insert(operation.get()).second) continue;
    for (const HostRange& range : operation->host) {
      if (range.end > begin && range.begin < end) return true;
    }
    stack.insert(stack.end(), operation->needs.begin(), operation->needs.end());
  }
  return false;
}

bool still_used(uintptr_t begin, uintptr_t end) {
  std::vector<OperationPtr> last = tails();
  return std::any_of(last.begin(), last.end(), [&](const OperationPtr& o) { return touches(o, begin, end); });
}

// A copy's target is undefined until the copy is done: show it.
void poison_target(const HostRange& range) {
  if (range.written && !still_used(range.begin, range.end)) {
    poison(reinterpret_cast<void*>(range.begin), range.end - range.begin, 0xD5);
  }
}

std::vector<std::weak_ptr<Operation>> waiting;
bool leaving = false;  // the process exits: what the worker reads is about to be destroyed

void leave() {
  std::lock_guard guard(lock);
  leaving = true;
}

void worker() {
  std::mt19937 random(unsigned(option_number("CUDA_DOUBLE_SEED", 1)));
  unsigned max_us = unsigned(option_number("CUDA_DOUBLE_DELAY_US", 300));
  for (;;) {
    usleep(random() % (max_us + 1));
    std::lock_guard guard(lock);
    if (leaving) return;
    if (waiting.empty()) continue;
    size_t pick = random() % waiting.size();
    OperationPtr operation = waiting[pick].lock();
    if (!operation || operation->done) {
      waiting.erase(waiting.begin() + long(pick));
      continue;
    }
    while (OperationPtr need = first_unfinished_need(*operation)) operation = need;
    if (!operation->busy) run(*operation);
  }
}

void hand_to_worker(const OperationPtr& operation) {
  static std::once_flag started;
  std::call_once(started, [] {
    std::atexit(leave);
    std::thread(worker).detach();
  });
  waiting.push_back(operation);
}

CUresult copy_now(CUdeviceptr to, CUdeviceptr from, size_t size) {
  for (CUdeviceptr address : {to, from}) {
    if (find_allocation(address) && !in_live_memory(address, size)) {
      report("memcpy of " + std::to_string(size) + " bytes: " + describe(address));
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
  }
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size);
  return CUDA_SUCCESS;
}

bool exceeds(uintptr_t address, size_t size) {
  Allocation* found = find_allocation(address);
  return found && (found->state == MemoryState::freed || address + size > found->end());
}

HostRange host_range(CUdeviceptr to, CUdeviceptr from, size_t size) {
  if (!is_device(to)) return {to, to + size, true};
  if (!is_device(from)) return {from, from + size, false};
  return {};
}

}  // namespace

CUstream resolve(CUstream stream) {
  if (!stream || stream == CU_STREAM_LEGACY || stream == &legacy) return &legacy;
  return streams.count(stream) ? stream : nullptr;
}

CUstream create_stream(unsigned flags, int priority) {
  static unsigned long long serial = 0;
  auto* made = new CUstream_st;
  made->flags = flags;
  made->priority = std::clamp(priority, -5, 0);
  made->id = ++serial;
  streams.insert(made);
  return made;
}

CUresult destroy_stream(CUstream stream) {
  if (!streams.erase(stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->tail && !stream->tail->done) orphans.push_back(stream->tail);
  delete stream;
  return CUDA_SUCCESS;
}

bool is_event(CUevent event) { return events.count(event) != 0; }

CUevent create_event(unsigned flags) {
  auto* made = new CUevent_st;
  made->flags = flags;
  events.insert(made);
  return made;
}

CUresult destroy_event(CUevent event) {
  if (!events.erase(event)) return CUDA_ERROR_INVALID_HANDLE;
  delete event;
  return CUDA_SUCCESS;
}

CUresult enqueue(CUstream handle, Work work, std::vector<HostRange> host) {
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) {
    stream->capture->nodes.push_back({std::move(work), host.empty() ? HostRange{} : host[0]});
    return CUDA_SUCCESS;
  }
  for (const HostRange& range : host) poison_target(range);
  auto operation = std::make_shared<Operation>();
  operation->work = std::move(work);
  operation->host = std::move(host);
  auto need = [&](const OperationPtr& other) {
    if (other && !other->done) operation->needs.push_back(other);
  };
  need(stream->tail);
  if (stream == &legacy) {
    for (CUstream other : streams) {
      if (blocking(other)) need(other->tail);
    }
  } else if (blocking(stream)) {
    need(legacy.tail);
  }
  stream->tail = operation;
  if (threaded()) hand_to_worker(operation);
  return CUDA_SUCCESS;
}

void force(const OperationPtr& operation) {
  std::vector<OperationPtr> stack{operation};
  while (!stack.empty()) {
    OperationPtr next = stack.back();
    if (!next || next->done) {
      stack.pop_back();
    } else if (OperationPtr need = first_unfinished_need(*next)) {
      stack.push_back(need);
    } else if (next->busy) {  // another thread runs it, in a host function
      lock.unlock();
      usleep(50);
      lock.lock();
    } else {
      run(*next);
    }
  }
}

CUresult synchronize(CUstream handle) {
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) {
    stream->capture_broken = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (stream == &legacy) {
    for (CUstream other : streams) {
      if (blocking(other)) force(other->tail);
    }
  }
  force(stream->tail);
  return sticky_error;
}

CUresult synchronize_all() {
  for (const OperationPtr& last : tails()) force(last);
  orphans.clear();
  return sticky_error;
}

CUresult refuse_while_capturing() {
  for (CUstream stream : streams) {
    if (stream->capture && stream->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL) {
      stream->capture_broken = true;
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

// Pageable memory is refused outright: such a copy is synchronous by CUDA's rules and would hide a missing wait.
CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  if (!size) return CUDA_SUCCESS;
  if (exceeds(to, size) || exceeds(from, size)) {
    report("memcpy of " + std::to_string(size) +
           " bytes: " + describe(exceeds(to, size) ? to + size - 1 : from + size - 1));
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (CUdeviceptr address : {to, from}) {
    if (is_device(address) || is_pinned(address)) continue;
    report("asynchronous copy with pageable host memory");
    return CUDA_ERROR_INVALID_VALUE;
  }
  HostRange host = host_range(to, from, size);
  std::vector<HostRange> ranges;
  if (host.end) ranges.push_back(host);
  return enqueue(stream, [=] { return copy_now(to, from, size); }, ranges);
}

CUresult fill(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
  if (!find_allocation(to) || exceeds(to, size)) return CUDA_ERROR_INVALID_VALUE;
  return enqueue(stream, [=]() -> CUresult {
    if (!in_live_memory(to, size)) {
      report("memset: " + describe(to));
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    std::memset(reinterpret_cast<void*>(to), value, size);
    return CUDA_SUCCESS;
  });
}

CUresult launch_graph(CUgraphExec graph, CUstream handle) {
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return CUDA_ERROR_NOT_SUPPORTED;
  std::vector<HostRange> host;
  for (const GraphNode& node : graph->nodes) {
    if (node.host.end) host.push_back(node.host);
  }
  auto nodes = std::make_shared<std::vector<GraphNode>>(graph->nodes);  // the graph may be destroyed before it runs
  Work work = [nodes]() -> CUresult {
    for (const GraphNode& node : *nodes) {
      if (CUresult result = node.work()) return result;
    }
    return CUDA_SUCCESS;
  };
  return enqueue(stream, work, host);
}

void settle_host_range(uintptr_t begin, uintptr_t end) {
  for (const OperationPtr& last : tails()) {
    if (!touches(last, begin, end)) continue;
    report("pinned host memory was freed while a queued copy still uses it");
    force(last);
  }
}

}  // namespace cuda_double
