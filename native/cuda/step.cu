// The end of a step: states carried over, the largest logits chosen, and what the next step reads made ready.

// Whether the host will be told of a fault; read once, because `fault` lies in the host's memory.
__global__ void seen(const i64* fault, i64* stop) { *stop = *reinterpret_cast<const volatile i64*>(fault); }

// to = from, by units of BYTES; nothing when the step has failed, so that it can be fed again.
template <class T>
__global__ void carry(T* to, const T* from, i64 n, const i64* stop) {
  i64 i = thread_index();
  if (i < n && *stop == 0) to[i] = from[i];
}

// Before another: the larger, a NaN before all, equal ones by id; id -1 is nothing.
struct Ranked {
  float value;
  i64 id;
  __device__ bool before(const Ranked& other) const {
    if (id < 0 || other.id < 0) return id >= 0;
    bool nan = value != value, other_nan = other.value != other.value;
    if (nan != other_nan) return nan;
    if (!nan && value != other.value) return value > other.value;
    return id < other.id;
  }
};

__device__ inline Ranked warp_first(Ranked mine) {
  for (int step = kWarp / 2; step; step >>= 1) {
    Ranked other = {__shfl_xor_sync(kAll, mine.value, step), __shfl_xor_sync(kAll, mine.id, step)};
    if (other.before(mine)) mine = other;
  }
  return mine;
}

// The first of all threads' candidates, in every thread.
__device__ inline Ranked block_first(Ranked mine) {
  __shared__ float values[kWarp];
  __shared__ i64 ids[kWarp];
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  mine = warp_first(mine);
  __syncthreads();  // the last call's readers are done
  if (lane == 0) values[warp] = mine.value, ids[warp] = mine.id;
  __syncthreads();
  Ranked nothing = {0.f, -1}, theirs = {values[lane % (blockDim.x / kWarp)], ids[lane % (blockDim.x / kWarp)]};
  return warp_first(lane < blockDim.x / kWarp ? theirs : nothing);
}

// The k first of x [n], `slice` elements a block, in order; by rounds, each for the first one after the last. `given`:
// the ids of x, or null for 0..n-1. -> ids and values [blocks, k].
template <class T>
__global__ void top(const T* x, const i64* given, i64* ids, float* values, i64 n, i64 slice, i64 k) {
  i64 begin = blockIdx.x * slice, end = min(n, begin + slice);
  Ranked last = {0.f, -1};
  for (i64 round = 0; round < k; ++round) {
    Ranked best = {0.f, -1};
    for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
      Ranked next = {widen(x[i]), given ? given[i] : i};
      if ((round == 0 || last.before(next)) && next.before(best)) best = next;
    }
    last = block_first(best);
    if (threadIdx.x == 0) ids[blockIdx.x * k + round] = last.id, values[blockIdx.x * k + round] = last.value;
    if (last.id < 0) {  // the same in every thread; fewer than k there
      for (i64 rest = round + 1 + threadIdx.x; rest < k; rest += blockDim.x) {
        ids[blockIdx.x * k + rest] = -1, values[blockIdx.x * k + rest] = 0.f;
      }
      return;
    }
  }
}

// The step after one of one token: the best id is fed, one position further. Positions may be several (or none).
template <class I, class P>
__global__ void advance(const i64* best, I* input, P* positions, i64 num_positions, i64* past_len) {
  i64 i = thread_index();
  if (i < num_positions) positions[i] += 1;
  if (i) return;
  if (input) input[0] = static_cast<I>(best[0]);
  if (past_len) *past_len += 1;
}
