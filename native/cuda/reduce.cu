// Along one run of axes: rows are (outer, inner) pairs, `size` elements `inner` apart; one block a row.

struct Sum : Plus {
  static __device__ float prepare(float x) { return x; }
  static __device__ float finish(float total, float) { return total; }
};
struct Mean : Sum {
  static __device__ float finish(float total, float count) { return total / count; }
};
struct SumSquare : Sum {
  static __device__ float prepare(float x) { return x * x; }
};
struct L2 : SumSquare {
  static __device__ float finish(float total, float) { return sqrtf(total); }
};
struct L1 : Sum {
  static __device__ float prepare(float x) { return fabsf(x); }
};
struct LogSum : Sum {
  static __device__ float finish(float total, float) { return logf(total); }
};
struct ReduceMax : Largest {
  static __device__ float prepare(float x) { return x; }
  static __device__ float finish(float total, float) { return total; }
};
struct ReduceMin {
  template <class C>
  static __device__ C of(C a, C b) {
    return a < b || a != a ? a : b;
  }
  template <class C>
  static __device__ C identity() {
    return C(infinity());
  }
  static __device__ float prepare(float x) { return x; }
  static __device__ float finish(float total, float) { return total; }
};

template <class Op, class T>
__global__ void reduce(const T* x, T* y, i64 size, i64 inner) {
  i64 base = blockIdx.x / inner * size * inner + blockIdx.x % inner;
  float total = Op::template identity<float>();
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) total = Op::of(total, Op::prepare(widen(x[base + i * inner])));
  total = block_reduce<Op>(total);
  if (threadIdx.x == 0) y[blockIdx.x] = narrow<T>(Op::finish(total, static_cast<float>(size)));
}

template <bool LOG, class T>
__global__ void softmax(const T* x, T* y, i64 size, i64 inner) {
  i64 base = blockIdx.x / inner * size * inner + blockIdx.x % inner;
  float top = -infinity();
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) top = Largest::of(top, widen(x[base + i * inner]));
  top = block_reduce<Largest>(top);
  float total = 0.f;
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) total += expf(widen(x[base + i * inner]) - top);
  total = block_reduce<Plus>(total);
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) {
    float shifted = widen(x[base + i * inner]) - top;
    y[base + i * inner] = narrow<T>(LOG ? shifted - logf(total) : expf(shifted) / total);
  }
}

// The first of equal values, or the last; a NaN is larger than everything; index -1 is nothing.

template <bool LEAST, bool LAST, class C>
__device__ inline bool better(C a, i64 i, C b, i64 j) {
  if (j < 0) return i >= 0;
  if (i < 0) return false;
  bool a_nan = a != a, b_nan = b != b;
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a != b) return LEAST ? a < b : a > b;
  return LAST ? i > j : i < j;
}

template <bool LEAST, bool LAST, class C>
__device__ inline void warp_best(C& value, i64& index) {
  for (int step = kWarp / 2; step; step >>= 1) {
    C other = __shfl_xor_sync(kAll, value, step);
    i64 at = __shfl_xor_sync(kAll, index, step);
    if (better<LEAST, LAST>(other, at, value, index)) value = other, index = at;
  }
}

template <bool LEAST, bool LAST, class T>
__global__ void arg(const T* x, i64* y, i64 size, i64 inner) {
  typedef typename Computed<T>::type C;
  __shared__ C values[kWarp];
  __shared__ i64 indices[kWarp];
  i64 base = blockIdx.x / inner * size * inner + blockIdx.x % inner, index = -1;
  C value = C(0);
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) {
    C next = widen(x[base + i * inner]);
    if (better<LEAST, LAST>(next, i, value, index)) value = next, index = i;
  }
  warp_best<LEAST, LAST>(value, index);
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) values[warp] = value, indices[warp] = index;
  __syncthreads();
  if (warp) return;
  bool there = lane < blockDim.x / kWarp;
  value = there ? values[lane] : C(0);
  index = there ? indices[lane] : -1;
  warp_best<LEAST, LAST>(value, index);
  if (lane == 0) y[blockIdx.x] = index;
}

// The k best of a row in order, by k rounds: `taken` marks what went out. For the small k of sampling.
template <bool LEAST, class T>
__global__ void top_k(const T* x, T* y, i64* at, unsigned char* taken, i64 size, i64 inner, i64 k) {
  typedef typename Computed<T>::type C;
  __shared__ C values[kWarp];
  __shared__ i64 indices[kWarp];
  i64 outer = blockIdx.x / inner, column = blockIdx.x % inner, base = outer * size * inner + column;
  unsigned char* mine = taken + blockIdx.x * size;
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) mine[i] = 0;
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (i64 round = 0; round < k; ++round) {
    __syncthreads();
    C value = C(0);
    i64 index = -1;
    for (i64 i = threadIdx.x; i < size; i += blockDim.x) {
      C next = widen(x[base + i * inner]);
      if (!mine[i] && better<LEAST, false>(next, i, value, index)) value = next, index = i;
    }
    warp_best<LEAST, false>(value, index);
    if (lane == 0) values[warp] = value, indices[warp] = index;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < blockDim.x / kWarp; ++w) {
        if (better<LEAST, false>(values[w], indices[w], value, index)) value = values[w], index = indices[w];
      }
      i64 out = (outer * k + round) * inner + column;
      y[out] = x[base + index * inner];
      at[out] = index;
      mine[index] = 1;
    }
  }
}
