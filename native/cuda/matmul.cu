// Products with f32 sums. A row's bits depend neither on the number of rows nor on the vector width: each output is
// summed over K in the same order by the same threads.

constexpr int kWarps = 8;  // K is dealt out to the warps of a block in turn

// y [M, N] = alpha a b (+ beta c), b [K, N] row by row. One block: 32 * V columns, ROWS rows; a lane holds V columns.
template <int V, int ROWS, class T>
__global__ void columns(const T* a, const T* b, const T* c, T* y, i64 m, i64 n, i64 k, i64 a_row, i64 a_step, i64 c_row,
                        i64 c_column, i64 a_batch, i64 b_batch, float alpha, float beta) {
  __shared__ float partial[kWarps][kWarp * V];
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  i64 column = (blockIdx.x * i64(kWarp) + lane) * V, first = i64(blockIdx.y) * ROWS;
  a += blockIdx.z * a_batch;
  b += blockIdx.z * b_batch;
  y += blockIdx.z * m * n;
  float sums[ROWS][V] = {};
  if (column < n) {
#pragma unroll 4  // loads in flight: the order of the sums stays
    for (i64 i = warp; i < k; i += kWarps) {
      Vector<T, V> weights = load<T, V>(b + i * n + column);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float value = first + r < m ? widen(a[(first + r) * a_row + i * a_step]) : 0.f;
#pragma unroll
        for (int v = 0; v < V; ++v) sums[r][v] += value * widen(weights.value[v]);
      }
    }
  }
  for (int r = 0; r < ROWS && first + r < m; ++r) {
    __syncthreads();
    for (int v = 0; v < V; ++v) partial[warp][lane * V + v] = sums[r][v];
    __syncthreads();
    for (int j = threadIdx.x; j < kWarp * V; j += blockDim.x) {
      i64 at = blockIdx.x * i64(kWarp) * V + j;
      if (at >= n) continue;
      float total = 0.f;
      for (int w = 0; w < kWarps; ++w) total += partial[w][j];
      total *= alpha;
      if (c) total += beta * widen(c[(first + r) * c_row + at * c_column]);
      y[(first + r) * n + at] = narrow<T>(total);
    }
  }
}

// The same with b [N, K]: one warp a column, lanes along K, V elements a load.
template <int V, int ROWS, class T>
__global__ void transposed(const T* a, const T* b, const T* c, T* y, i64 m, i64 n, i64 k, i64 a_row, i64 a_step,
                           i64 c_row, i64 c_column, i64 a_batch, i64 b_batch, float alpha, float beta) {
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  i64 column = blockIdx.x * i64(kWarps) + warp, first = i64(blockIdx.y) * ROWS;
  if (column >= n) return;
  a += blockIdx.z * a_batch;
  b += blockIdx.z * b_batch;
  y += blockIdx.z * m * n;
  float sums[ROWS] = {};
  for (i64 i = lane * V; i < k; i += kWarp * V) {
    Vector<T, V> weights = load<T, V>(b + column * k + i);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= m) continue;
      const T* row = a + (first + r) * a_row + i * a_step;
#pragma unroll
      for (int v = 0; v < V; ++v) sums[r] += widen(row[v * a_step]) * widen(weights.value[v]);
    }
  }
  for (int r = 0; r < ROWS && first + r < m; ++r) {
    float total = warp_reduce<Plus>(sums[r]) * alpha;
    if (c) total += beta * widen(c[(first + r) * c_row + column * c_column]);
    if (lane == 0) y[(first + r) * n + column] = narrow<T>(total);
  }
}

// The same product for many rows: tiles of a and b in shared memory, 4 x 2 outputs a thread. Every output is kept as
// kWarps running sums, dealt out and added up as `columns` does it, so that both give the same bits.
constexpr int kTileRows = 64, kTileColumns = 32, kTileDepth = 16, kSide = 16;

template <class T>
__global__ void __launch_bounds__(kSide* kSide)
    tiled(const T* a, const T* b, const T* c, T* y, i64 m, i64 n, i64 k, i64 a_row, i64 a_step, i64 c_row, i64 c_column,
          i64 a_batch, i64 b_batch, float alpha, float beta) {
  __shared__ float left[kTileDepth][kTileRows + 1], right[kTileDepth][kTileColumns + 1];
  int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
  i64 column = i64(blockIdx.x) * kTileColumns, first = i64(blockIdx.y) * kTileRows;
  a += blockIdx.z * a_batch;
  b += blockIdx.z * b_batch;
  y += blockIdx.z * m * n;
  float sums[4][2][kWarps] = {};
  for (i64 start = 0; start < k; start += kTileDepth) {
    for (int i = threadIdx.x; i < kTileRows * kTileDepth; i += kSide * kSide) {
      int row = i / kTileDepth, step = i % kTileDepth;
      bool there = first + row < m && start + step < k;
      left[step][row] = there ? widen(a[(first + row) * a_row + (start + step) * a_step]) : 0.f;
    }
    for (int i = threadIdx.x; i < kTileColumns * kTileDepth; i += kSide * kSide) {
      int step = i / kTileColumns, at = i % kTileColumns;
      bool there = column + at < n && start + step < k;
      right[step][at] = there ? widen(b[(start + step) * n + column + at]) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kTileDepth; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int v = 0; v < 2; ++v) sums[r][v][step % kWarps] += left[step][ty * 4 + r] * right[step][tx * 2 + v];
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r) {
    for (int v = 0; v < 2; ++v) {
      i64 row = first + ty * 4 + r, at = column + tx * 2 + v;
      if (row >= m || at >= n) continue;
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += sums[r][v][w];
      total *= alpha;
      if (c) total += beta * widen(c[row * c_row + at * c_column]);
      y[row * n + at] = narrow<T>(total);
    }
  }
}
