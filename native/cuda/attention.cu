// genai.Attention: new K and V go to their slots, then each new query attends over what is held. Keys are taken in
// tiles of kTile at fixed positions and tiles are merged in order, so that a row's bits depend neither on T nor on the
// grid. The state block: past_len, then (address, capacity) of each slot.

constexpr int kTile = 128;  // keys of a tile, and threads of a block

template <class T>
__device__ inline T* slot_rows(const i64* state, i64 slot, i64 head, i64 dim) {
  T* base = reinterpret_cast<T*>(state[1 + 2 * slot]);
  return base + head * state[2 + 2 * slot] * dim;
}

// Where head h of token t begins: [T, H * D] or [H, T, D] by strides.
#define HEAD(x, t, h) (x + (t) * x##_token + (h) * x##_head)

// RMS norm over the row in shared memory, by the whole block.
template <class W>
__device__ inline void norm_row(float* row, i64 dim, const W* weight, float epsilon) {
  float squares = 0.f;
  for (i64 i = threadIdx.x; i < dim; i += blockDim.x) squares += row[i] * row[i];
  float inverse = 1.f / sqrtf(block_reduce<Plus>(squares) / dim + epsilon);
  for (i64 i = threadIdx.x; i < dim; i += blockDim.x) row[i] *= inverse * widen(weight[i]);
  __syncthreads();
}

template <class C>
__device__ inline void rotate_row(float* row, i64 half, const C* cos, const C* sin, int interleaved) {
  for (i64 i = threadIdx.x; i < half; i += blockDim.x) {
    i64 first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : half + i;
    float x = row[first], y = row[second], c = widen(cos[i]), s = widen(sin[i]);
    row[first] = x * c - y * s;
    row[second] = y * c + x * s;
  }
  __syncthreads();
}

// One block a (head, token): query heads first, then key heads, then value heads. Queries stay f32 [T, H, D].
template <class T, class KV, class C, class I>
__global__ void prepare(const T* q, i64 q_token, i64 q_head, const T* k, i64 k_token, i64 k_head, const T* v,
                        i64 v_token, i64 v_head, const C* cos, const C* sin, const I* position_ids, const T* q_norm,
                        const T* k_norm, float* queries, const i64* state, i64 heads, i64 kv_heads, i64 dim,
                        i64 value_dim, i64 half, i64 key_slot, i64 value_slot, float epsilon, int interleaved,
                        i64 max_position, i64* fault) {
  extern __shared__ float row[];
  i64 head = blockIdx.x, token = blockIdx.y, position = state[0] + token;
  if (head >= heads + kv_heads) {
    head -= heads + kv_heads;
    KV* to = slot_rows<KV>(state, value_slot, head, value_dim) + position * value_dim;
    const T* from = HEAD(v, token, head);
    for (i64 i = threadIdx.x; i < value_dim; i += blockDim.x) to[i] = narrow<KV>(widen(from[i]));
    return;
  }
  bool query = head < heads;
  if (!query) head -= heads;
  const T* from = query ? HEAD(q, token, head) : HEAD(k, token, head);
  for (i64 i = threadIdx.x; i < dim; i += blockDim.x) row[i] = widen(from[i]);
  __syncthreads();
  const T* weight = query ? q_norm : k_norm;
  if (weight) norm_row(row, dim, weight, epsilon);
  if (cos) {
    i64 at = position_ids ? static_cast<i64>(position_ids[token]) : position;
    if (at < 0 || at >= max_position) {
      *fault = (i64(1) << 62) + at;
      at = 0;
    }
    rotate_row(row, half, cos + at * half, sin + at * half, interleaved);
  }
  if (query) {
    for (i64 i = threadIdx.x; i < dim; i += blockDim.x) queries[(token * heads + head) * dim + i] = row[i];
  } else {
    KV* to = slot_rows<KV>(state, key_slot, head, dim) + position * dim;
    for (i64 i = threadIdx.x; i < dim; i += blockDim.x) to[i] = narrow<KV>(row[i]);
  }
}

struct Scores {
  float scale, softcap;
  int bias_first;
  __device__ float capped(float value) const { return softcap > 0.f ? softcap * tanhf(value / softcap) : value; }
  __device__ float of(float dot, float bias) const {
    return bias_first ? capped(dot * scale + bias) : capped(dot * scale) + bias;
  }
};

template <class M>
__device__ inline float bias_of(M value) {
  if constexpr (Same<M, bool>::value)
    return value ? 0.f : -infinity();
  else
    return widen(value);
}

// In the order of the elements, however they are loaded.
template <class KV>
__device__ inline float dot(const float* query, const KV* key, i64 dim) {
  constexpr int kVector = 16 / sizeof(KV);
  float total = 0.f;
  if (dim % kVector == 0 && reinterpret_cast<u64>(key) % 16 == 0) {
    for (i64 i = 0; i < dim; i += kVector) {
      Vector<KV, kVector> part = load<KV, kVector>(key + i);
#pragma unroll
      for (int v = 0; v < kVector; ++v) total += query[i + v] * widen(part.value[v]);
    }
  } else {
    for (i64 i = 0; i < dim; ++i) total += query[i] * widen(key[i]);
  }
  return total;
}

// acc, top, total of two sets of keys become those of both.
__device__ inline void merge(float& top, float& total, float other_top, float other_total, float& keep, float& add) {
  float both = fmaxf(top, other_top);
  keep = top == -infinity() ? 0.f : expf(top - both);
  add = other_top == -infinity() ? 0.f : expf(other_top - both);
  total = total * keep + other_total * add;
  top = both;
}

// One query against keys [begin, end): what is read, and what has been summed so far. By a block of kTile threads.
template <class KV, class M>
struct Query {
  float *query, *weights, *acc;  // shared: [dim], [kTile], [value_dim]
  const KV *keys, *values;
  i64 key_stride, value_stride, dim, value_dim;
  const M* mask;  // of this query's row, or null
  i64 mask_key, begin, end;
  Scores scores;
  float top, total;

  __device__ float score(i64 key) const {
    float bias = mask ? bias_of(mask[key * mask_key]) : 0.f;
    return bias == -infinity() ? bias : scores.of(dot(query, keys + key * key_stride, dim), bias);
  }

  __device__ void start() {
    for (i64 i = threadIdx.x; i < value_dim; i += kTile) acc[i] = 0.f;
    top = -infinity();
    total = 0.f;
    __syncthreads();
  }

  __device__ void take(i64 tile) {
    i64 key = tile * kTile + threadIdx.x;
    float mine = key >= begin && key < end ? score(key) : -infinity();
    float tile_top = block_reduce<Largest>(mine), weight = mine == -infinity() ? 0.f : expf(mine - tile_top);
    weights[threadIdx.x] = weight;
    float tile_total = block_reduce<Plus>(weight), keep, add;
    merge(top, total, tile_top, tile_total, keep, add);
    i64 from = max(begin, tile * kTile), to = min(end, (tile + 1) * kTile);
    for (i64 i = threadIdx.x; i < value_dim; i += kTile) {
      float sum = 0.f;
      for (i64 j = from; j < to; ++j) sum += weights[j - tile * kTile] * widen(values[j * value_stride + i]);
      acc[i] = acc[i] * keep + sum * add;
    }
    __syncthreads();
  }

  __device__ void take_all() {
    for (i64 tile = begin / kTile; tile < (end + kTile - 1) / kTile; ++tile) take(tile);
  }

  // `extra` is one more score whose weight is dropped (a sink), or -infinity.
  template <class T>
  __device__ void finish(T* y, float extra) {
    float keep, add;
    merge(top, total, extra, extra == -infinity() ? 0.f : 1.f, keep, add);
    for (i64 i = threadIdx.x; i < value_dim; i += kTile) y[i] = narrow<T>(total == 0.f ? 0.f : acc[i] * keep / total);
  }
};

// One block a (tile or all tiles, head, token). PARTIAL: the tile's own (top, total, acc[value_dim]) goes to `partial`
// [T, H, tiles, value_dim + 2]; else the block takes all tiles in order and writes the output.
template <bool PARTIAL, class T, class KV, class M>
__global__ void attend(const float* queries, T* y, i64 y_token, i64 y_head, const M* mask, i64 mask_token,
                       i64 mask_head, i64 mask_key, const T* sink, float* partial, const i64* state, i64 heads,
                       i64 group, i64 num_new, i64 appended, i64 dim, i64 value_dim, i64 key_slot, i64 value_slot,
                       i64 window, float scale, float softcap, int causal, int smooth, int bias_first) {
  extern __shared__ float shared[];
  i64 head = blockIdx.y, token = blockIdx.z, total_len = state[0] + appended, position = total_len - num_new + token;
  Query<KV, M> q;
  q.query = shared, q.weights = shared + dim, q.acc = q.weights + kTile;
  q.keys = slot_rows<KV>(state, key_slot, head / group, dim), q.key_stride = q.dim = dim;
  q.values = slot_rows<KV>(state, value_slot, head / group, value_dim), q.value_stride = q.value_dim = value_dim;
  q.mask = mask ? mask + token * mask_token + head * mask_head : nullptr, q.mask_key = mask_key;
  q.end = causal ? position + 1 : total_len, q.begin = window > 0 ? max(position - window + 1, i64(0)) : 0;
  q.scores = {scale, softcap, bias_first};
  for (i64 i = threadIdx.x; i < dim; i += kTile) q.query[i] = queries[(token * heads + head) * dim + i];
  q.start();
  if (PARTIAL) {
    q.take(blockIdx.x);
    float* out = partial + ((token * heads + head) * gridDim.x + blockIdx.x) * (value_dim + 2);
    for (i64 i = threadIdx.x; i < value_dim; i += kTile) out[2 + i] = q.acc[i];
    if (threadIdx.x == 0) out[0] = q.top, out[1] = q.total;
  } else {
    q.take_all();
    q.finish(HEAD(y, token, head), sink ? widen(sink[head]) : smooth ? 0.f : -infinity());
  }
}

// ONNX Attention over K and V as they are: one block a (head, token, sequence). Query t stands at key t, or, with
// lengths, the last query at the last key.
template <class T, class KV, class M, class I>
__global__ void dense(const T* q, i64 q_batch, i64 q_token, i64 q_head, const KV* k, i64 k_batch, i64 k_token,
                      i64 k_head, const KV* v, i64 v_batch, i64 v_token, i64 v_head, T* y, i64 y_batch, i64 y_token,
                      i64 y_head, const M* mask, i64 mask_batch, i64 mask_token, i64 mask_head, i64 mask_key,
                      const I* lengths, i64 num_keys, i64 group, i64 dim, i64 value_dim, i64 left, i64 right,
                      float scale, float softcap, int bias_first, i64* fault) {
  extern __shared__ float shared[];
  i64 head = blockIdx.x, token = blockIdx.y, batch = blockIdx.z, tokens = gridDim.y;
  i64 held = lengths ? static_cast<i64>(lengths[batch]) : num_keys, position = lengths ? held - tokens + token : token;
  if (held < 0 || held > num_keys) {
    *fault = (i64(1) << 62) + held;
    return;
  }
  const T* from = HEAD(q, token, head) + batch * q_batch;
  Query<KV, M> one;
  one.query = shared, one.weights = shared + dim, one.acc = one.weights + kTile;
  one.keys = k + batch * k_batch + head / group * k_head, one.key_stride = k_token, one.dim = dim;
  one.values = v + batch * v_batch + head / group * v_head, one.value_stride = v_token, one.value_dim = value_dim;
  one.mask = mask ? mask + batch * mask_batch + token * mask_token + head * mask_head : nullptr,
  one.mask_key = mask_key;
  one.end = right < 0 ? held : min(held, position + right + 1), one.begin = left < 0 ? 0 : max(position - left, i64(0));
  one.scores = {scale, softcap, bias_first};
  for (i64 i = threadIdx.x; i < dim; i += kTile) one.query[i] = widen(from[i]);
  one.start();
  one.take_all();
  one.finish(HEAD(y, token, head) + batch * y_batch, -infinity());
}

// Merges the tiles of a (head, token) in order.
template <class T>
__global__ void combine(const float* partial, T* y, i64 y_token, i64 y_head, const T* sink, i64 heads, i64 tiles,
                        i64 value_dim, int smooth) {
  i64 head = blockIdx.x, token = blockIdx.y;
  const float* from = partial + (token * heads + head) * tiles * (value_dim + 2);
  for (i64 i = threadIdx.x; i < value_dim; i += blockDim.x) {
    float top = -infinity(), total = 0.f, acc = 0.f, keep, add;
    for (i64 tile = 0; tile < tiles; ++tile) {
      const float* part = from + tile * (value_dim + 2);
      if (part[0] == -infinity()) continue;
      merge(top, total, part[0], part[1], keep, add);
      acc = acc * keep + part[2 + i] * add;
    }
    float extra = sink ? widen(sink[head]) : smooth ? 0.f : -infinity();
    merge(top, total, extra, extra == -infinity() ? 0.f : 1.f, keep, add);
    *(HEAD(y, token, head) + i) = narrow<T>(total == 0.f ? 0.f : acc * keep / total);
  }
}

// RotaryEmbedding on its own: one block a (head, token); x and y by strides, cos and sin rows by position.
template <class T, class I>
__global__ void rotary(const T* x, T* y, i64 x_batch, i64 x_token, i64 x_head, const T* cos, const T* sin,
                       const I* position_ids, i64 position_step, i64 num_tokens, i64 dim, i64 half, int interleaved,
                       i64 max_position, i64* fault) {
  extern __shared__ float row[];
  i64 head = blockIdx.x, token = blockIdx.y, batch = blockIdx.z,
      offset = batch * x_batch + token * x_token + head * x_head;
  for (i64 i = threadIdx.x; i < dim; i += blockDim.x) row[i] = widen(x[offset + i]);
  __syncthreads();
  i64 at = batch * num_tokens + token;  // without ids the caches are [B, T, half]
  if (position_ids) at = position_step ? position_ids[at] : position_ids[0] + token;
  if (at < 0 || at >= max_position) {
    *fault = (i64(1) << 62) + at;
    at = 0;
  }
  rotate_row(row, half, cos + at * half, sin + at * half, interleaved);
  for (i64 i = threadIdx.x; i < dim; i += blockDim.x) y[offset + i] = narrow<T>(row[i]);
}
