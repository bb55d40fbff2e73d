// Layers with a state: causal convolution and linear attention. States come in and go out as tensors.

// x [B, C, T], weight [C, 1, k], past [B, C, k-1] -> y, the last k-1 columns; one thread a channel, in time order.
template <bool SILU, class T>
__global__ void causal_conv(const T* x, const T* weight, const T* bias, const T* past, T* y, T* present, i64 n,
                            i64 channels, i64 num_tokens, i64 width) {
  i64 i = thread_index();
  if (i >= n) return;
  i64 channel = i % channels, held = width - 1;
  auto at = [&](i64 t) {  // column t of past ++ x
    if (t < held) return past ? widen(past[i * held + t]) : 0.f;
    return widen(x[i * num_tokens + t - held]);
  };
  for (i64 t = 0; t < num_tokens; ++t) {
    float total = 0.f;
    for (i64 tap = 0; tap < width; ++tap) total += widen(weight[channel * width + tap]) * at(t + tap);
    if (bias) total += widen(bias[channel]);
    y[i * num_tokens + t] = narrow<T>(SILU ? total / (1.f + expf(-total)) : total);
  }
  for (i64 t = 0; t < held; ++t) present[i * held + t] = narrow<T>(at(num_tokens + t));
}

// One block a (value head, batch), one thread a value column; its state column [d_k] stays with it in shared memory.
// S = keep S; S += beta k (v - S'k)' with DELTA, k v' without; y = q'S after the update.
template <bool DELTA, class T, class P>
__global__ void __launch_bounds__(256)
    linear_attention(const T* q, const T* k, const T* v, const P* past, const T* decay, const T* beta, T* y, P* present,
                     i64 num_tokens, i64 q_heads, i64 k_heads, i64 heads, i64 kv_heads, i64 d_k, i64 d_v,
                     i64 decay_width, i64 beta_heads, float scale) {
  extern __shared__ float shared[];  // state [d_k, d_v], query [d_k], key [d_k], keep [d_k]
  float *state = shared, *query = state + d_k * d_v, *key = query + d_k, *keep = key + d_k;
  i64 head = blockIdx.x, batch = blockIdx.y, kv_head = head / (heads / kv_heads), column = threadIdx.x;
  i64 state_at = (batch * kv_heads + kv_head) * d_k * d_v;
  for (i64 i = threadIdx.x; i < d_k * d_v; i += blockDim.x) state[i] = past ? widen(past[state_at + i]) : 0.f;
  for (i64 t = 0; t < num_tokens; ++t) {
    i64 row = batch * num_tokens + t;
    __syncthreads();
    for (i64 i = threadIdx.x; i < d_k; i += blockDim.x) {
      query[i] = widen(q[(row * q_heads + head / (heads / q_heads)) * d_k + i]) * scale;
      key[i] = widen(k[(row * k_heads + head / (heads / k_heads)) * d_k + i]);
      keep[i] = decay ? expf(widen(decay[(row * kv_heads + kv_head) * decay_width + (decay_width == 1 ? 0 : i)])) : 1.f;
    }
    __syncthreads();
    if (column < d_v) {
      float rate = beta ? widen(beta[row * beta_heads + (beta_heads == 1 ? 0 : kv_head)]) : 1.f, guess = 0.f, out = 0.f;
      for (i64 i = 0; i < d_k; ++i) {
        state[i * d_v + column] *= keep[i];
        if (DELTA) guess += key[i] * state[i * d_v + column];
      }
      float target = (widen(v[(row * kv_heads + kv_head) * d_v + column]) - guess) * rate;
      for (i64 i = 0; i < d_k; ++i) {
        state[i * d_v + column] += key[i] * target;
        out += query[i] * state[i * d_v + column];
      }
      y[(row * heads + head) * d_v + column] = narrow<T>(out);
    }
  }
  __syncthreads();
  if (head % (heads / kv_heads) == 0) {
    for (i64 i = threadIdx.x; i < d_k * d_v; i += blockDim.x) present[state_at + i] = narrow<P>(state[i]);
  }
}

// decay = decay_scale * softplus(a + dt_bias), rate = sigmoid(b).
template <class T>
__global__ void linear_attention_gate(const T* a, const T* dt_bias, const T* decay_scale, const T* b, T* decay, T* rate,
                                      i64 n, i64 width) {
  i64 i = thread_index();
  if (i >= n) return;
  float x = widen(a[i]) + widen(dt_bias[i % width]);
  float positive = fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)));
  decay[i] = narrow<T>(widen(decay_scale[i % width]) * positive);
  if (b) rate[i] = narrow<T>(1.f / (1.f + expf(-widen(b[i]))));
}
