// One block a row: statistics in f32 over the block, one rounding to the output's type.

// The value to normalise: with a skip it is rounded where a separate Add would round it.
template <class T>
struct Row {
  const T *x, *skip, *add;  // of this row; skip and add may be null
  __device__ float at(i64 i) const {
    float value = widen(x[i]);
    if (!skip) return value;
    value += widen(skip[i]);
    if (add) value += widen(add[i]);
    return widen(narrow<T>(value));
  }
};

// CENTER: LayerNormalization; without: RMS. x (+ skip + add) [rows, width] -> y. The row is read three times, from the
// cache after the first, so that its width has no limit.
template <bool CENTER, class T, class G, class Y>
__global__ void norm(const T* x, const T* skip, const T* add, const G* gamma, const G* beta, Y* y, float* mean_out,
                     float* inverse_out, T* sum, i64 width, i64 skip_rows, float epsilon) {
  i64 row = blockIdx.x;
  Row<T> values = {x + row * width, skip ? skip + row % skip_rows * width : nullptr, add};
  float total = 0.f;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float value = values.at(i);
    if (sum) sum[row * width + i] = narrow<T>(value);
    total += value;
  }
  float mean = CENTER ? block_reduce<Plus>(total) / width : 0.f, squares = 0.f;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float value = values.at(i) - mean;
    squares += value * value;
  }
  float inverse = 1.f / sqrtf(block_reduce<Plus>(squares) / width + epsilon);
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float value = (values.at(i) - mean) * inverse * widen(gamma[i]);
    if (beta) value += widen(beta[i]);
    y[row * width + i] = narrow<Y>(value);
  }
  if (threadIdx.x == 0 && mean_out) mean_out[row] = mean;
  if (threadIdx.x == 0 && inverse_out) inverse_out[row] = inverse;
}

// x / its p-norm along an axis: rows are (outer, inner) pairs, `size` elements `inner` apart.
template <int P, class T>
__global__ void lp_norm(const T* x, T* y, i64 size, i64 inner) {
  i64 base = blockIdx.x / inner * size * inner + blockIdx.x % inner;
  float total = 0.f;
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) {
    float value = widen(x[base + i * inner]);
    total += P == 1 ? fabsf(value) : value * value;
  }
  total = block_reduce<Plus>(total);
  float length = P == 1 ? total : sqrtf(total);
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) {
    y[base + i * inner] = narrow<T>(length == 0.f ? 0.f : widen(x[base + i * inner]) / length);
  }
}

enum Activation { NONE, SILU, SIGMOID };

// RMS norm over groups of `width` elements, times the activated gate; one block a group.
template <int GATE, class T>
__global__ void gated_rms_norm(const T* x, const T* gamma, const T* gate, T* y, i64 width, float epsilon) {
  i64 base = blockIdx.x * width;
  float squares = 0.f;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) squares += widen(x[base + i]) * widen(x[base + i]);
  float inverse = 1.f / sqrtf(block_reduce<Plus>(squares) / width + epsilon);
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float opened = widen(gate[base + i]), open = 1.f / (1.f + expf(-opened));
    y[base + i] = narrow<T>(widen(x[base + i]) * inverse * widen(gamma[i]) * (GATE == SILU ? opened * open : open));
  }
}
