// Block-quantized weights: b [N, blocks, block_size * BITS / 8] bytes, low bits first, one scale (and zero) a block.
// One warp a column of the result; a lane takes CHUNK weights with one load, so weights are read once. `shift` is log2
// of the block size.

constexpr int kWarps = 4;
// Pieces whose loads are in flight together; the order of the sums stays. Many rows fill the registers by themselves.
template <int ROWS>
constexpr int kUnroll = ROWS == 1   ? 4
                        : ROWS <= 4 ? 2
                                    : 1;

template <int BYTES>
struct alignas(BYTES) Packed {
  unsigned word[BYTES / 4];
};

// Zero points: none (the middle), packed like the weights, or one float a block.
template <int BITS, class Z>
__device__ inline float zero_of(const Z* zeros, i64 column, i64 block, i64 blocks) {
  if (!zeros) return 1 << (BITS - 1);
  if constexpr (Same<Z, unsigned char>::value) {
    constexpr int kLanes = 8 / BITS;
    i64 bytes = (blocks + kLanes - 1) / kLanes;
    return zeros[column * bytes + block / kLanes] >> (block % kLanes * BITS) & ((1 << BITS) - 1);
  } else {
    return widen(zeros[column * blocks + block]);
  }
}

template <int BITS>
__device__ inline int level(const unsigned* words, int i) {
  return words[i * BITS / 32] >> (i * BITS % 32) & ((1 << BITS) - 1);
}

// COUNT activations from column `start` of a row of K, zeros beyond; `wide`: whole loads are aligned and inside.
template <int COUNT, class T>
__device__ inline void take(float (&values)[COUNT], const T* row, i64 start, i64 k, bool wide) {
  constexpr int kVector = COUNT * sizeof(T) < 16 ? COUNT : 16 / sizeof(T);
  if (wide && start + COUNT <= k) {
#pragma unroll
    for (int i = 0; i < COUNT; i += kVector) {
      Vector<T, kVector> part = load<T, kVector>(row + start + i);
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[i + v] = widen(part.value[v]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = start + i < k ? widen(row[start + i]) : 0.f;
}

// y [M, N] = a [M, K] times the weights, activations as they are. Lanes take small pieces side by side, so that the
// activations of a warp's piece lie in few cache lines.
template <int BITS, int CHUNK, int ROWS, class T, class S, class Z>
__global__ void nbits(const T* a, const unsigned char* b, const S* scales, const Z* zeros, const T* bias, T* y, i64 m,
                      i64 n, i64 k, int shift, i64 blocks, int wide) {
  constexpr int kBytes = CHUNK * BITS / 8;
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  i64 column = blockIdx.x * i64(kWarps) + warp, first = i64(blockIdx.y) * ROWS;
  if (column >= n) return;
  float sums[ROWS] = {};
  i64 chunks = (blocks << shift) / CHUNK;
#pragma unroll kUnroll < ROWS>
  for (i64 chunk = lane; chunk < chunks; chunk += kWarp) {
    i64 start = chunk * CHUNK, block = start >> shift;
    Packed<kBytes> packed = *reinterpret_cast<const Packed<kBytes>*>(b + (column * chunks + chunk) * kBytes);
    float scale = widen(scales[column * blocks + block]), zero = zero_of<BITS>(zeros, column, block, blocks);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= m) continue;
      float values[CHUNK], dot = 0.f;
      take<CHUNK>(values, a + (first + r) * k, start, k, wide);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) dot += values[i] * (level<BITS>(packed.word, i) - zero);
      sums[r] += dot * scale;
    }
  }
  for (int r = 0; r < ROWS && first + r < m; ++r) {
    float total = warp_reduce<Plus>(sums[r]);
    if (bias) total += widen(bias[column]);
    if (lane == 0) y[(first + r) * n + column] = narrow<T>(total);
  }
}

// accuracy_level 4: one block of a's row becomes int8, scale = max|a| / 127, level = round half even(a * 127/max|a|).
template <class T>
__global__ void quantize_rows(const T* a, signed char* levels, float* scales, i64 count, i64 k, i64 block_size,
                              i64 blocks) {
  i64 i = thread_index();
  if (i >= count) return;
  i64 row = i / blocks, start = i % blocks * block_size;
  float top = 0.f;
  for (i64 j = start; j < min(start + block_size, k); ++j) top = fmaxf(top, fabsf(widen(a[row * k + j])));
  float scale = top / 127.f, inverse = scale == 0.f ? 0.f : 127.f / top;
  scales[i] = scale;
  for (i64 j = 0; j < block_size; ++j) {
    float value = start + j < k ? rintf(widen(a[row * k + start + j]) * inverse) : 0.f;
    levels[i * block_size + j] = static_cast<signed char>(fminf(fmaxf(value, -128.f), 127.f));
  }
}

__device__ inline int dot4(int a, int b, int sum) { return __dp4a(a, b, sum); }

// Four levels as the bytes of an int.
template <int BITS>
__device__ inline unsigned four(const unsigned* words, int i) {
  if constexpr (BITS == 8) return words[i / 4];
  unsigned half = words[i / 8] >> (i % 8 * 4) & 0xffff;  // nibbles 3210 of this group
  half = (half | half << 8) & 0x00ff00ff;
  return (half | half << 4) & 0x0f0f0f0f;
}

// The dot product of unsigned levels and signed activations: what is above 127 is put back by the sum of a.
template <int BITS, int CHUNK, int ROWS, class T, class S, class Z>
__global__ void nbits_int8(const signed char* a, const float* a_scales, const unsigned char* b, const S* scales,
                           const Z* zeros, const T* bias, T* y, i64 m, i64 n, int shift, i64 blocks) {
  constexpr int kBytes = CHUNK * BITS / 8;
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  i64 column = blockIdx.x * i64(kWarps) + warp, first = i64(blockIdx.y) * ROWS, padded = blocks << shift;
  if (column >= n) return;
  float sums[ROWS] = {};
  i64 chunks = padded / CHUNK;
#pragma unroll kUnroll < ROWS>
  for (i64 chunk = lane; chunk < chunks; chunk += kWarp) {
    i64 start = chunk * CHUNK, block = start >> shift;
    Packed<kBytes> packed = *reinterpret_cast<const Packed<kBytes>*>(b + (column * chunks + chunk) * kBytes);
    float scale = widen(scales[column * blocks + block]), zero = zero_of<BITS>(zeros, column, block, blocks);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= m) continue;
      int dot = 0, sum = 0;
#pragma unroll
      for (int from = 0; from < CHUNK; from += 16) {  // a chunk is 16 or 32, its start a multiple of it
        Vector<int, 4> part = load<int, 4>(reinterpret_cast<const int*>(a + (first + r) * padded + start + from));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned levels = four<BITS>(packed.word, from + 4 * i) ^ (BITS == 8 ? 0x80808080u : 0u);
          dot = dot4(part.value[i], static_cast<int>(levels), dot);
          sum = dot4(part.value[i], 0x01010101, sum);
        }
      }
      if (BITS == 8) dot += 128 * sum;
      sums[r] += (dot - zero * sum) * (scale * a_scales[(first + r) * blocks + block]);
    }
  }
  for (int r = 0; r < ROWS && first + r < m; ++r) {
    float total = warp_reduce<Plus>(sums[r]);
    if (bias) total += widen(bias[column]);
    if (lane == 0) y[(first + r) * n + column] = narrow<T>(total);
  }
}

// Rows of a quantized table [rows, width]: (q - zero) * scale, blocks along the width; one thread an element.
template <int BITS, bool PACKED, class S, class I>
__global__ void gather_rows(const unsigned char* data, const I* indices, const S* scales, const unsigned char* zeros,
                            S* y, i64 n, i64 rows, i64 width, i64 block_size, i64 blocks) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 column = i % width, index = indices[i / width], row = index < 0 ? index + rows : index;
  if (row < 0 || row >= rows) {  // zeros, unlike Gather
    y[i] = narrow<S>(0.f);
    return;
  }
  constexpr int kLanes = PACKED ? 8 / BITS : 1;
  unsigned char byte = data[(row * width + column) / kLanes];
  i64 block = column / block_size;
  float value = PACKED ? static_cast<float>(byte >> (column % kLanes * BITS) & ((1 << BITS) - 1))
                       : static_cast<float>(static_cast<signed char>(byte));
  float zero = PACKED  ? zero_of<BITS>(zeros, row, block, blocks)
               : zeros ? static_cast<float>(static_cast<signed char>(zeros[row * blocks + block]))
                       : 0.f;
  y[i] = narrow<S>((value - zero) * widen(scales[row * blocks + block]));
}
