// Mixtures of experts: a slot is a (row, chosen expert) pair. Only the chosen experts' weights are read, once a slot;
// what lies between the projections stays in f32.

// The k largest of a row's router values and their weights; one warp a row. Equal values: the lower index first.
// The weights are the softmax over all experts, or separate ones [rows, experts]; `normalize` makes those chosen sum
// to 1.
template <class T>
__global__ void route(const T* router, const T* weights, int* chosen, float* mix, i64 experts, i64 k, int normalize) {
  i64 row = blockIdx.x;
  int lane = threadIdx.x;
  const T* values = router + row * experts;
  float top = -infinity(), total = 0.f;
  for (i64 e = lane; e < experts; e += kWarp) top = fmaxf(top, widen(values[e]));
  top = warp_reduce<Largest>(top);
  for (i64 e = lane; e < experts; e += kWarp) total += expf(widen(values[e]) - top);
  total = warp_reduce<Plus>(total);
  float last = infinity(), sum = 0.f;
  i64 last_index = -1;
  for (i64 slot = 0; slot < k; ++slot) {  // the best one after the last one taken
    float best = -infinity();
    i64 index = experts;
    for (i64 e = lane; e < experts; e += kWarp) {
      float value = widen(values[e]);
      bool after = value < last || (value == last && e > last_index);
      if (after && (value > best || (value == best && e < index))) best = value, index = e;
    }
    for (int step = kWarp / 2; step; step >>= 1) {
      float other = __shfl_xor_sync(kAll, best, step);
      i64 at = __shfl_xor_sync(kAll, index, step);
      if (other > best || (other == best && at < index)) best = other, index = at;
    }
    last = best, last_index = index;
    float weight = weights ? widen(weights[row * experts + index]) : expf(best - top) / total;
    sum += weight;
    if (lane == 0) chosen[row * k + slot] = static_cast<int>(index), mix[row * k + slot] = weight;
  }
  __syncwarp();
  if (normalize && sum != 0.f) {
    for (i64 slot = lane; slot < k; slot += kWarp) mix[row * k + slot] /= sum;
  }
}

// y [slots, N] = x [rows, K] times the expert's w [N, K] transposed, plus its bias. One warp a (column, slot).
template <class X, class T>
__global__ void expert(const X* x, const int* chosen, const T* w, const T* bias, float* y, i64 n, i64 k,
                       i64 slots_a_row) {
  int lane = threadIdx.x % kWarp;
  i64 column = blockIdx.x * i64(blockDim.x / kWarp) + threadIdx.x / kWarp, slot = blockIdx.y;
  if (column >= n) return;
  i64 which = chosen[slot];
  const T* weights = w + (which * n + column) * k;
  const X* row = x + slot / slots_a_row * k;
  float sum = 0.f;
  for (i64 i = lane; i < k; i += kWarp) sum += widen(row[i]) * widen(weights[i]);
  sum = warp_reduce<Plus>(sum);
  if (lane == 0) y[slot * n + column] = bias ? sum + widen(bias[which * n + column]) : sum;
}

// The same with packed weights [experts, N, K * BITS / 8]; a block's zero point is packed along the blocks of a row,
// or, with one block a row (rowwise), along the rows.
template <int BITS, class X, class S, class T>
__global__ void expert_nbits(const X* x, const int* chosen, const unsigned char* w, const S* scales,
                             const unsigned char* zeros, const T* bias, float* y, i64 n, i64 k, i64 block_size,
                             i64 blocks, int rowwise, i64 slots_a_row) {
  constexpr int kLanes = 8 / BITS, kMask = (1 << BITS) - 1;
  int lane = threadIdx.x % kWarp;
  i64 column = blockIdx.x * i64(blockDim.x / kWarp) + threadIdx.x / kWarp, slot = blockIdx.y;
  if (column >= n) return;
  i64 which = chosen[slot], line = which * n + column;
  const X* row = x + slot / slots_a_row * k;
  float sum = 0.f;
  for (i64 byte = lane; byte < k / kLanes; byte += kWarp) {
    unsigned packed = w[line * (k / kLanes) + byte];
    i64 block = byte * kLanes / block_size;
    float zero = 1 << (BITS - 1);
    if (zeros && rowwise) {
      zero = zeros[which * ((n + kLanes - 1) / kLanes) + column / kLanes] >> (column % kLanes * BITS) & kMask;
    } else if (zeros) {
      zero = zeros[line * ((blocks + kLanes - 1) / kLanes) + block / kLanes] >> (block % kLanes * BITS) & kMask;
    }
    float scale = widen(scales[line * blocks + block]);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      sum += widen(row[byte * kLanes + i]) * ((static_cast<float>(packed >> (i * BITS) & kMask) - zero) * scale);
    }
  }
  sum = warp_reduce<Plus>(sum);
  if (lane == 0) y[slot * n + column] = bias ? sum + widen(bias[line]) : sum;
}

// Activations rounded to int8 block by block, as accuracy_level 4 of MatMulNBits has it, and widened again.
template <class X>
__global__ void as_int8(const X* x, float* y, i64 count, i64 k, i64 block_size, i64 blocks) {
  i64 i = thread_index();
  if (i >= count) return;
  i64 row = i / blocks, start = i % blocks * block_size, end = min(start + block_size, k);
  float top = 0.f;
  for (i64 j = start; j < end; ++j) top = fmaxf(top, fabsf(widen(x[row * k + j])));
  float scale = top / 127.f, inverse = scale == 0.f ? 0.f : 127.f / top;
  for (i64 j = start; j < end; ++j) y[row * k + j] = rintf(widen(x[row * k + j]) * inverse) * scale;
}

struct Relu {
  static __device__ float of(float x) { return fmaxf(x, 0.f); }
};
struct GeluErf {
  static __device__ float of(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }
};
struct Silu {
  static __device__ float of(float x) { return x / (1.f + expf(-x)); }
};
struct Identity {
  static __device__ float of(float x) { return x; }
};

// y = f(h) (* other).
template <class F>
__global__ void activate(const float* h, const float* other, float* y, i64 n) {
  i64 i = thread_index();
  if (i < n) y[i] = F::of(h[i]) * (other ? other[i] : 1.f);
}

// gate * sigmoid(alpha gate) * (linear + beta). FUSION 1: gate and linear in turn in h; 2: one half each; 0: linear
// apart.
template <int FUSION>
__global__ void swiglu(const float* h, const float* other, float* y, i64 n, i64 width, float alpha, float beta,
                       float limit) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 row = i / width, column = i % width, base = row * width;
  float gate = FUSION == 1 ? h[2 * i] : FUSION == 2 ? h[2 * base + column] : h[i];
  float linear = FUSION == 1 ? h[2 * i + 1] : FUSION == 2 ? h[2 * base + width + column] : other[i];
  if (limit > 0.f) gate = fminf(gate, limit), linear = fminf(fmaxf(linear, -limit), limit);
  y[i] = gate / (1.f + expf(-alpha * gate)) * (linear + beta);
}

// y [rows, n]: a row's slots, mixed.
template <class T>
__global__ void mix_slots(const float* slots, const float* mix, T* y, i64 count, i64 n, i64 k) {
  i64 i = thread_index();
  if (i >= count) return;
  i64 row = i / n;
  float sum = 0.f;
  for (i64 slot = row * k; slot < (row + 1) * k; ++slot) sum += mix[slot] * slots[slot * n + i % n];
  y[i] = narrow<T>(sum);
}
