// One thread a line along an axis, in order, so that sums are the same in every run: lines are (outer, inner) pairs,
// elements `inner` apart.

template <class T>
__global__ void cum_sum(const T* x, T* y, i64 lines, i64 size, i64 inner, int exclusive, int reverse) {
  i64 line = thread_index();
  if (line >= lines) return;
  i64 base = line / inner * size * inner + line % inner;
  typename Computed<T>::type total = 0;
  for (i64 step = 0; step < size; ++step) {
    i64 at = base + (reverse ? size - 1 - step : step) * inner;
    if (exclusive) y[at] = narrow<T>(total);
    total += widen(x[at]);
    if (!exclusive) y[at] = narrow<T>(total);
  }
}

enum Reduction { REPLACE, ADD, MULTIPLY, LARGER, SMALLER };

// y [outer, size, inner] holds the data; updates and indices [outer, count, inner]. Equal indices go by their order. An
// index outside is told to the host.
template <int REDUCTION, class T, class I>
__global__ void scatter_elements(const I* indices, const T* updates, T* y, i64* fault, i64 lines, i64 size, i64 inner,
                                 i64 count) {
  i64 line = thread_index();
  if (line >= lines) return;
  i64 from = line / inner * count * inner + line % inner, to = line / inner * size * inner + line % inner;
  for (i64 i = 0; i < count; ++i) {
    i64 index = static_cast<i64>(indices[from + i * inner]), row = index < 0 ? index + size : index;
    if (row < 0 || row >= size) {
      *fault = (i64(1) << 62) + index;
      continue;
    }
    T *target = y + to + row * inner, update = updates[from + i * inner];
    if constexpr (REDUCTION == REPLACE) {
      *target = update;
    } else {
      auto old = widen(*target), next = widen(update);
      if constexpr (REDUCTION == ADD) *target = narrow<T>(old + next);
      if constexpr (REDUCTION == MULTIPLY) *target = narrow<T>(old * next);
      if constexpr (REDUCTION == LARGER) *target = narrow<T>(next > old || next != next ? next : old);
      if constexpr (REDUCTION == SMALLER) *target = narrow<T>(next < old || next != next ? next : old);
    }
  }
}

// Rotary with three streams of positions [3, B, T]: column c of the caches [positions, half] reads one of them, by
// sections or, INTERLEAVED STREAMS, in turn. One thread a pair, or an element that stays.
template <class T, class C, class I>
__global__ void m_rotary(const T* x, const I* ids, const C* cos, const C* sin, T* y, i64 n, i64 batch_stride,
                         i64 token_stride, i64 head_stride, i64 batches, i64 heads, i64 tokens, i64 dim, i64 half,
                         i64 second_section, i64 third_section, int in_turn, int interleaved, i64 max_position,
                         i64* fault) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 width = dim - half, column = i % width, token = i / width % tokens, head = i / width / tokens % heads;
  i64 batch = i / width / tokens / heads;
  i64 base = batch * batch_stride + token * token_stride + head * head_stride;
  if (column >= half) {
    i64 at = base + 2 * half + column - half;
    y[at] = x[at];
    return;
  }
  i64 stream = column % 3;
  if (in_turn)
    stream = (stream == 1 && column < 3 * second_section) || (stream == 2 && column < 3 * third_section) ? stream : 0;
  else
    stream = column >= half - third_section ? 2 : column >= half - third_section - second_section ? 1 : 0;
  i64 position = static_cast<i64>(ids[(stream * batches + batch) * tokens + token]);
  if (position < 0 || position >= max_position) {
    *fault = (i64(1) << 62) + position;
    return;
  }
  float c = widen(cos[position * half + column]), s = widen(sin[position * half + column]);
  i64 first = base + (interleaved ? 2 * column : column), second = interleaved ? first + 1 : first + half;
  float real = widen(x[first]), imaginary = widen(x[second]);
  y[first] = narrow<T>(real * c - imaginary * s);
  y[second] = narrow<T>(imaginary * c + real * s);
}
