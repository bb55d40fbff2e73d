#include "executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <random>
#include <utility>

#include "memory.h"
#include "state.h"

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

// Saves the callee-saved registers on the stack, stores the stack pointer in *from, and goes on at `to`.
extern "C" void cuda_double_switch(void** from, void* to);
asm(R"(
.text
.globl cuda_double_switch
.hidden cuda_double_switch
.type cuda_double_switch,@function
cuda_double_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size cuda_double_switch, .-cuda_double_switch
)");

namespace cuda_double {
namespace {

constexpr size_t kStack = 128 << 10;
constexpr size_t kSharedMax = 256 << 10;
constexpr int kGroups = 8;                         // different warp masks alive at once
constexpr uint64_t kLost = 0xFFA5FFA5FFA5FFA5ull;  // what a lane gets from a lane that did not take part: NaN

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
};

enum class Run { ready, at_barrier, at_exchange, done };

struct Warp;
struct Worker : Thread {
  Warp* warp = nullptr;
  Fiber* fiber = nullptr;
  Run run = Run::ready;
};

// The lanes of one mask meet here. Two generations of results: a late reader of the last one is not overwritten.
struct Group {
  unsigned mask = 0, arrived = 0, generation = 0;
  unsigned active[2] = {0, 0};
  uint64_t values[2][32];
};

struct Warp {
  unsigned alive = 0;
  int num_groups = 0;
  Group groups[kGroups];
  Worker* lanes[32] = {};
};

struct Barrier {
  unsigned waiting = 0, generation = 0;
  int line = 0;
  Votes votes{0, true, false};
  Votes results[2];
};

// Everything about the one grid that runs now; the driver's lock keeps it alone.
struct Machine {
  const Launch* launch = nullptr;
  Block block;
  Worker* current = nullptr;
  Thread* current_thread = nullptr;
  void* scheduler = nullptr;
  void** arguments = nullptr;
  unsigned alive = 0;
  Barrier barrier;
  std::vector<Worker> workers;
  std::vector<Warp> warps;
  std::vector<Fiber*> idle;
  unsigned fibers_made = 0;
  std::mt19937 random{1};
  sigjmp_buf escape;
  int error = 0;
  std::string message;
} machine;

[[noreturn]] void fail(int error, const std::string& message) {
  machine.error = error;
  machine.message = message;
  siglongjmp(machine.escape, 1);
}

void pause() { cuda_double_switch(&machine.current->fiber->stack_pointer, machine.scheduler); }

void finish_barrier() {
  Barrier& barrier = machine.barrier;
  barrier.results[barrier.generation++ & 1] = barrier.votes;
  barrier.votes = {0, true, false};
  barrier.waiting = 0;
  barrier.line = 0;
  for (Worker& worker : machine.workers) {
    if (worker.run == Run::at_barrier) worker.run = Run::ready;
  }
}

Votes on_barrier(int line, bool vote) {
  Barrier& barrier = machine.barrier;
  if (!barrier.line) barrier.line = line;
  if (barrier.line != line) {
    fail(CUDA_ERROR_LAUNCH_FAILED, "divergent __syncthreads(): threads of one block wait at PTX lines " +
                                       std::to_string(barrier.line) + " and " + std::to_string(line));
  }
  unsigned generation = barrier.generation;
  barrier.votes.count += vote;
  barrier.votes.all &= vote;
  barrier.votes.any |= vote;
  if (++barrier.waiting == machine.alive) {
    finish_barrier();
  } else {
    machine.current->run = Run::at_barrier;
    pause();
  }
  return barrier.results[generation & 1];
}

void finish_exchange(Warp& warp, Group& group) {
  unsigned slot = group.generation++ & 1;
  group.active[slot] = group.arrived;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(group.arrived >> lane & 1)) {
      group.values[slot][lane] = kLost;
    } else if (warp.lanes[lane]->run == Run::at_exchange) {
      warp.lanes[lane]->run = Run::ready;
    }
  }
  group.arrived = 0;
}

Group& group_of(Warp& warp, unsigned mask) {
  Group* free = nullptr;
  for (int i = 0; i < warp.num_groups; ++i) {
    if (warp.groups[i].mask == mask) return warp.groups[i];
    if (!warp.groups[i].arrived) free = &warp.groups[i];
  }
  if (warp.num_groups < kGroups) free = &warp.groups[warp.num_groups++];
  if (!free) fail(CUDA_ERROR_LAUNCH_FAILED, "limit of the double: more than 8 warp masks at once");
  free->mask = mask;
  free->arrived = free->generation = 0;
  return *free;
}

Exchange on_exchange(unsigned mask, uint64_t value) {
  Worker& worker = *machine.current;
  if (!(mask >> worker.lane & 1)) {
    fail(CUDA_ERROR_LAUNCH_FAILED, "warp intrinsic: the mask does not name the calling lane");
  }
  Group& group = group_of(*worker.warp, mask);
  unsigned slot = group.generation & 1;
  group.values[slot][worker.lane] = value;
  group.arrived |= 1u << worker.lane;
  if (group.arrived == (mask & worker.warp->alive)) {
    finish_exchange(*worker.warp, group);
  } else {
    worker.run = Run::at_exchange;
    pause();
  }
  return {group.values[slot], group.active[slot]};
}

// Local arrays live on the fiber's own stack.
bool in_local_memory(uint64_t address, unsigned size, Segment* out) {
  auto begin = reinterpret_cast<uint64_t>(machine.current->fiber->stack);
  if (address < begin || address + size > begin + kStack) return false;
  *out = {0, begin, begin + kStack};  // page 0: never cached, the next thread has another stack
  return true;
}

bool in_shared_memory(uint64_t address, unsigned size, Segment* out) {
  auto begin = reinterpret_cast<uint64_t>(machine.block.shared);
  if (address < begin || address + size > begin + machine.block.shared_size) return false;
  *out = {address >> 12, begin, begin + machine.block.shared_size};
  return true;
}

void on_check(uint64_t address, unsigned size, Segment* out) {
  if (live_segment(address, size, out) || in_shared_memory(address, size, out) || in_local_memory(address, size, out))
    return;
  out->page = 0;
  fail(CUDA_ERROR_ILLEGAL_ADDRESS, "illegal access: " + describe(address + size - 1));
}

void on_fail(int error, const char* message) { fail(error, message); }

void leave(Worker& worker) {
  worker.run = Run::done;
  --machine.alive;
  Warp& warp = *worker.warp;
  warp.alive &= ~(1u << worker.lane);
  if (machine.alive && machine.barrier.waiting == machine.alive) finish_barrier();
  for (int i = 0; i < warp.num_groups; ++i) {
    Group& group = warp.groups[i];
    if (group.arrived && group.arrived == (group.mask & warp.alive)) finish_exchange(warp, group);
  }
}

void fiber_main() {
  for (;;) {
    machine.launch->kernel->run(machine.arguments);
    leave(*machine.current);
    pause();
  }
}

Fiber* new_fiber() {
  auto* fiber = new Fiber;
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  fiber->stack = static_cast<char*>(memory);
  // Tops are staggered: stacks at equal offsets would share the same cache sets.
  char* top = fiber->stack + kStack - (++machine.fibers_made * 5 % 32) * 64;
  void** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(63));
  *--frame = nullptr;
  *--frame = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--frame = nullptr;
  fiber->stack_pointer = frame;
  return fiber;
}

Fiber* take_fiber() {
  if (machine.idle.empty()) return new_fiber();
  Fiber* fiber = machine.idle.back();
  machine.idle.pop_back();
  return fiber;
}

void resume(Worker& worker) {
  if (!worker.fiber) worker.fiber = take_fiber();
  machine.current = &worker;
  machine.current_thread = &worker;
  cuda_double_switch(&machine.scheduler, worker.fiber->stack_pointer);
  if (worker.run == Run::done) machine.idle.push_back(std::exchange(worker.fiber, nullptr));
}

[[noreturn]] void report_deadlock() {
  auto count = [](Run run) {
    return std::to_string(
        std::count_if(machine.workers.begin(), machine.workers.end(), [=](Worker& w) { return w.run == run; }));
  };
  machine.current = nullptr;
  fail(CUDA_ERROR_LAUNCH_FAILED, "deadlock: " + count(Run::at_barrier) + " threads wait at __syncthreads(), " +
                                     count(Run::at_exchange) + " in a warp intrinsic, " + count(Run::done) +
                                     " have exited");
}

Dim3 unflatten(size_t index, Dim3 dim) {
  return {unsigned(index % dim.x), unsigned(index / dim.x % dim.y), unsigned(index / dim.x / dim.y)};
}

void start_block() {
  Dim3 dim = machine.launch->block;
  for (unsigned i = 0; i < machine.workers.size(); ++i) {
    Worker& worker = machine.workers[i];
    static_cast<Thread&>(worker) = {unflatten(i, dim), i, i & 31};
    worker.warp = &machine.warps[i / 32];
    worker.run = Run::ready;
    worker.warp->lanes[i & 31] = &worker;
  }
  for (size_t i = 0; i < machine.warps.size(); ++i) {
    size_t lanes = std::min<size_t>(32, machine.workers.size() - i * 32);
    machine.warps[i].alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
    machine.warps[i].num_groups = 0;
  }
  machine.alive = unsigned(machine.workers.size());
  machine.barrier = {};
  poison(machine.block.shared, machine.block.shared_size, 0xB5);
}

// Threads start at a random one, forwards or backwards: a missing barrier shows.
void shuffle_threads(std::vector<unsigned>* order) {
  unsigned first = machine.random() % order->size();
  for (unsigned i = 0; i < order->size(); ++i) (*order)[i] = (i + first) % order->size();
  if (machine.random() & 1) std::reverse(order->begin(), order->end());
}

void run_block(std::vector<unsigned>* order) {
  start_block();
  shuffle_threads(order);
  while (machine.alive) {
    bool progress = false;
    for (unsigned i : *order) {
      if (machine.workers[i].run != Run::ready) continue;
      progress = true;
      resume(machine.workers[i]);
    }
    if (!progress) report_deadlock();
  }
}

void run_blocks(const Launch& launch) {
  std::vector<size_t> blocks(launch.grid.volume());
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), machine.random);
  std::vector<unsigned> order(machine.workers.size());
  for (size_t block : blocks) {
    machine.block.index = unflatten(block, launch.grid);
    run_block(&order);
  }
}

std::string where() {
  auto text = [](Dim3 d) {
    return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
  };
  std::string at = std::string("kernel ") + machine.launch->kernel->name + " block " + text(machine.block.index);
  return machine.current ? at + " thread " + text(machine.current->index) : at;
}

void prepare(const Launch& launch) {
  static std::vector<char> shared(kSharedMax + 1024);
  size_t size = launch.kernel->static_shared + launch.dynamic_shared;
  auto base = reinterpret_cast<uintptr_t>(shared.data());
  machine.launch = &launch;
  machine.block = {};
  machine.block.dim = launch.block;
  machine.block.grid = launch.grid;
  machine.block.shared = reinterpret_cast<char*>((base + 1023) & ~uintptr_t(1023));
  machine.block.shared_size = size;
  machine.workers.assign(launch.block.volume(), {});
  machine.warps.assign((launch.block.volume() + 31) / 32, {});
  machine.random.seed(unsigned(option_number("CUDA_DOUBLE_SEED", 1)));
}

}  // namespace

const Services* executor_services() {
  static const Services services = {on_barrier,    on_exchange, on_check, on_fail, &machine.current_thread,
                                    &machine.block};
  return &services;
}

int run_grid(const Launch& launch, std::string* message) {
  prepare(launch);
  std::vector<void*> arguments(launch.kernel->num_parameters + 1);
  size_t offset = 0;
  for (unsigned i = 0; i < launch.kernel->num_parameters; ++i) {
    arguments[i] = const_cast<char*>(launch.arguments.data()) + offset;
    offset += (launch.kernel->sizes[i] + 15) / 16 * 16;
  }
  machine.arguments = arguments.data();
  machine.error = 0;
  if (sigsetjmp(machine.escape, 0) == 0) {
    run_blocks(launch);
  } else {
    *message = where() + ": " + machine.message;  // a failed block's fibers are abandoned with their stacks
  }
  machine.current = nullptr;
  return machine.error;
}

}  // namespace cuda_double
