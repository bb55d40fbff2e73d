// Products of 16-bit floats on tensor cores (mma.sync m16n8k16, from sm_80 on), f32 sums. The weights are the left
// operand, 16 columns of the result a tile, and 8 tokens the right one. K is dealt to the warps of a block in steps of
// 32, and the warps are added up in order: a token's bits depend neither on how many there are nor on the grid.

constexpr int kWarps = 8, kStep = 32, kTokens = 8;

template <class T>
__device__ inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#ifdef GENAI_BF16
  if constexpr (Same<T, __nv_bfloat16>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    return;
  }
#endif
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();  // the planner takes other kernels there
#endif
}

__device__ inline unsigned bits(const void* half) { return *static_cast<const unsigned short*>(half); }

// 8 elements of a row from column `at` on, two a word; zeros beyond `end`. WIDE: whole loads are aligned.
template <class T>
__device__ inline void take8(unsigned (&words)[4], const T* row, i64 at, i64 end, bool there, bool wide) {
  if (there && wide && at < end) {
    Vector<unsigned, 4> all = load<unsigned, 4>(reinterpret_cast<const unsigned*>(row + at));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = all.value[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    i64 first = at + 2 * i;
    unsigned low = there && first < end ? bits(row + first) : 0,
             high = there && first + 1 < end ? bits(row + first + 1) : 0;
    words[i] = high << 16 | low;
  }
}

// Of a warp's 32 steps of K, lane (g, t) holds 8 t .. 8 t + 7, four for each of two products. Weights of both, for J
// tiles of 16 columns.
template <bool TRANSPOSED, int J, class T>
struct Weights {
  unsigned part[2][J][4];

  // b [N, K]: tile j is columns 16 j .. 16 j + 15.
  __device__ void along(const T* b, i64 column, i64 at, i64 n, i64 k) {
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        i64 mine = column + 16 * j + 8 * half;
        unsigned words[4];
        take8(words, b + mine * k, at, k, mine < n, true);
#pragma unroll
        for (int h = 0; h < 2; ++h) part[h][j][half] = words[2 * h], part[h][j][half + 2] = words[2 * h + 1];
      }
    }
  }

  // b [K, N]: a lane holds 2 J columns side by side, tile j the pair 2 j, 2 j + 1 of each.
  __device__ void across(const T* b, i64 column, i64 at, i64 n, i64 k) {
    Vector<unsigned, J> rows[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rows[i] = {};
      if (column < n && at + i < k)
        rows[i] = load<unsigned, J>(reinterpret_cast<const unsigned*>(b + (at + i) * n + column));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < J; ++j) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          unsigned first = rows[4 * h + 2 * pair].value[j], second = rows[4 * h + 2 * pair + 1].value[j];
          part[h][j][2 * pair] = __byte_perm(first, second, 0x5410);
          part[h][j][2 * pair + 1] = __byte_perm(first, second, 0x7632);
        }
      }
    }
  }
};

// y [M, N] = alpha a b (+ beta c), b [K, N] or, TRANSPOSED, [N, K]. One block: 16 J columns, 8 TILES tokens.
template <bool TRANSPOSED, int J, int TILES, class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    product(const T* a, const T* b, const T* c, T* y, i64 m, i64 n, i64 k, i64 a_row, i64 c_row, i64 c_column,
            i64 a_batch, i64 b_batch, float alpha, float beta, int wide) {
  __shared__ float partial[kWarps][kTokens][16 * J];
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  i64 column = blockIdx.x * i64(16 * J), first = i64(blockIdx.y) * (kTokens * TILES);
  a += blockIdx.z * a_batch;
  b += blockIdx.z * b_batch;
  y += blockIdx.z * m * n;
  float sums[TILES][J][4] = {};
  for (i64 start = i64(warp) * kStep; start < k; start += kWarps * kStep) {
    i64 at = start + 8 * t;
    Weights<TRANSPOSED, J, T> weights;
    if constexpr (TRANSPOSED)
      weights.along(b, column + g, at, n, k);
    else
      weights.across(b, column + g * (2 * J), at, n, k);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      i64 token = first + kTokens * tile + g;
      unsigned values[4];
      take8(values, a + token * a_row, at, k, token < m, wide);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < J; ++j) multiply<T>(sums[tile][j], weights.part[h][j], values[2 * h], values[2 * h + 1]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    if (first + kTokens * tile >= m) break;  // the same for the whole block
    __syncthreads();
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int half = i / 2, where = TRANSPOSED ? 16 * j + 8 * half + g : g * 2 * J + 2 * j + half;
        partial[warp][2 * t + i % 2][where] = sums[tile][j][i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens * 16 * J; i += kWarps * kWarp) {
      i64 token = first + kTokens * tile + i / (16 * J), at = column + i % (16 * J);
      if (token >= m || at >= n) continue;
      float total = 0.f;
      for (int w = 0; w < kWarps; ++w) total += partial[w][i / (16 * J)][i % (16 * J)];
      total *= alpha;
      if (c) total += beta * widen(c[token * c_row + at * c_column]);
      y[token * n + at] = narrow<T>(total);
    }
  }
}
