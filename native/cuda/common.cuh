// What every kernel file starts with: types, one rounding on store, and sums over warps and blocks.
// NVRTC compiles common.cuh + <family>.cu as one text; GENAI_F16 and GENAI_BF16 are set when an instantiation needs
// them.
#ifdef GENAI_F16
#include <cuda_fp16.h>
#endif
#ifdef GENAI_BF16
#include <cuda_bf16.h>
#endif

typedef long long i64;
typedef unsigned long long u64;

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarp = 32;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// What a type is computed in: f32 for 32- and 16-bit floats, f64 for doubles, 64-bit integers for the rest.
template <class T>
struct Computed {
  typedef i64 type;
};
template <>
struct Computed<float> {
  typedef float type;
};
template <>
struct Computed<double> {
  typedef double type;
};
#ifdef GENAI_F16
template <>
struct Computed<__half> {
  typedef float type;
};
#endif
#ifdef GENAI_BF16
template <>
struct Computed<__nv_bfloat16> {
  typedef float type;
};
#endif

template <class T>
__device__ inline typename Computed<T>::type widen(T value) {
  return static_cast<typename Computed<T>::type>(value);
}
// The one rounding: to nearest even for floats, wrapping for integers.
template <class T, class C>
__device__ inline T narrow(C value) {
  return static_cast<T>(value);
}
#ifdef GENAI_F16
template <>
__device__ inline float widen<__half>(__half value) {
  return __half2float(value);
}
template <>
__device__ inline __half narrow<__half, float>(float value) {
  return __float2half_rn(value);
}
#endif
#ifdef GENAI_BF16
template <>
__device__ inline float widen<__nv_bfloat16>(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16, float>(float value) {
  return __float2bfloat16_rn(value);
}
#endif

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// N elements in one load; the address must be a multiple of their bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T value[N];
};

template <class T, int N>
__device__ inline Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

__device__ inline i64 thread_index() { return blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; }

// Reductions take an operator with `of(a, b)` and `identity()`.
struct Plus {
  template <class C>
  static __device__ C of(C a, C b) {
    return a + b;
  }
  template <class C>
  static __device__ C identity() {
    return C(0);
  }
};
struct Largest {  // a NaN wins
  template <class C>
  static __device__ C of(C a, C b) {
    return a > b || a != a ? a : b;
  }
  template <class C>
  static __device__ C identity() {
    return C(-infinity());
  }
};

template <class Op, class C>
__device__ inline C warp_reduce(C value) {
  for (int step = kWarp / 2; step; step >>= 1) value = Op::of(value, __shfl_xor_sync(kAll, value, step));
  return value;
}

// Over all threads of a block (a multiple of 32 of them); every thread gets the result, the same in every run.
template <class Op, class C>
__device__ inline C block_reduce(C value) {
  __shared__ C partial[kWarp];
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  value = warp_reduce<Op>(value);
  __syncthreads();  // the last call's readers are done
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  C total = lane < warps ? partial[lane] : Op::template identity<C>();
  return warp_reduce<Op>(total);
}
