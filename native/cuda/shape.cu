// Moving elements without computing: one thread an element, by its size in bytes.
#define STRIDES(x) i64 x##0, i64 x##1, i64 x##2, i64 x##3, i64 x##4, i64 x##5

// The remainder of rest / dim, and rest becomes the quotient: no division by 1, short ones where they suffice.
__device__ inline i64 split(i64& rest, i64 dim) {
  if (dim == 1) return 0;
  i64 before = rest;
  if ((rest | dim) >> 32 == 0)
    rest = static_cast<unsigned>(rest) / static_cast<unsigned>(dim);
  else
    rest /= dim;
  return before - rest * dim;
}

// y[to + walk] = x[from + walk]: Transpose, Slice, Expand, Concat, Split.
template <class T>
__global__ void strided_copy(const T* x, T* y, i64 n, i64 from, i64 to, i64 d0, i64 d1, i64 d2, i64 d3, i64 d4, i64 d5,
                             STRIDES(x), STRIDES(y)) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 dims[6] = {d0, d1, d2, d3, d4, d5};
  i64 x_strides[6] = {x0, x1, x2, x3, x4, x5}, y_strides[6] = {y0, y1, y2, y3, y4, y5};
#pragma unroll
  for (int k = 5; k >= 0; --k) {
    i64 at = split(i, dims[k]);
    from += at * x_strides[k];
    to += at * y_strides[k];
  }
  y[to] = x[from];
}

// data [outer, size, inner], indices [count] -> y [outer, count, inner]. An index outside is told to the host.
template <class T, class I>
__global__ void gather(const T* data, const I* indices, T* y, i64* fault, i64 n, i64 size, i64 inner, i64 count) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 column = i % inner, which = i / inner % count, outer = i / inner / count;
  i64 index = indices[which], row = index < 0 ? index + size : index;
  if (row < 0 || row >= size) {
    *fault = (i64(1) << 62) + index;
    return;
  }
  y[i] = data[(outer * size + row) * inner + column];
}

// data [outer, size, inner], indices like y [outer, count, inner].
template <class T, class I>
__global__ void gather_elements(const T* data, const I* indices, T* y, i64* fault, i64 n, i64 size, i64 inner,
                                i64 count) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 column = i % inner, outer = i / inner / count;
  i64 index = indices[i], row = index < 0 ? index + size : index;
  if (row < 0 || row >= size) {
    *fault = (i64(1) << 62) + index;
    return;
  }
  y[i] = data[(outer * size + row) * inner + column];
}

// x [.., rows, columns]; elements on the wrong side of the diagonal become 0.
template <class T>
__global__ void trilu(const T* x, T* y, i64 n, i64 rows, i64 columns, i64 diagonal, int upper) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 ahead = i % columns - i / columns % rows;
  y[i] = (upper ? ahead >= diagonal : ahead <= diagonal) ? x[i] : T(0);
}
