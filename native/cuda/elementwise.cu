// One thread an element. Operands broadcast by strides; equal shapes go without the index arithmetic.

#define WALK i64 d0, i64 d1, i64 d2, i64 d3, i64 d4, i64 d5
#define STRIDES(x) i64 x##0, i64 x##1, i64 x##2, i64 x##3, i64 x##4, i64 x##5
#define OFFSET(x) (i0 * x##0 + i1 * x##1 + i2 * x##2 + i3 * x##3 + i4 * x##4 + i5 * x##5)
#define UNRAVEL(index)                \
  i64 rest_ = index, i5 = rest_ % d5; \
  rest_ /= d5;                        \
  i64 i4 = rest_ % d4;                \
  rest_ /= d4;                        \
  i64 i3 = rest_ % d3;                \
  rest_ /= d3;                        \
  i64 i2 = rest_ % d2;                \
  rest_ /= d2;                        \
  i64 i1 = rest_ % d1, i0 = rest_ / d1

// ---- two operands
template <class C>
struct IsFloat {
  static constexpr bool value = !Same<C, i64>::value;
};

struct Add {
  template <class C>
  static __device__ C of(C a, C b) {
    return a + b;
  }
};
struct Sub {
  template <class C>
  static __device__ C of(C a, C b) {
    return a - b;
  }
};
struct Mul {
  template <class C>
  static __device__ C of(C a, C b) {
    return a * b;
  }
};
struct Div {  // integers: by zero gives 0, nothing traps
  template <class C>
  static __device__ C of(C a, C b) {
    if constexpr (IsFloat<C>::value) return a / b;
    return b == C(0) ? C(0) : b == C(-1) ? C(-a) : a / b;
  }
};
struct Pow {
  template <class C>
  static __device__ C of(C a, C b) {
    return b == C(2) ? a * a : powf(a, b);  // floats only
  }
};
struct Min {  // a NaN on either side wins
  template <class C>
  static __device__ C of(C a, C b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <class C>
  static __device__ C of(C a, C b) {
    return a > b || a != a ? a : b;
  }
};
struct TruncMod {
  template <class C>
  static __device__ C of(C a, C b) {
    if constexpr (IsFloat<C>::value) return fmod(a, b);
    return b == C(0) || b == C(-1) ? C(0) : C(i64(a) % i64(b));
  }
};
struct FloorMod {
  template <class C>
  static __device__ C of(C a, C b) {
    C rest = TruncMod::of<C>(a, b);
    return rest != C(0) && (rest < C(0)) != (b < C(0)) ? rest + b : rest;
  }
};
struct Equal {
  template <class C>
  static __device__ bool of(C a, C b) {
    return a == b;
  }
};
struct Less {
  template <class C>
  static __device__ bool of(C a, C b) {
    return a < b;
  }
};
struct LessOrEqual {
  template <class C>
  static __device__ bool of(C a, C b) {
    return a <= b;
  }
};
struct Greater {
  template <class C>
  static __device__ bool of(C a, C b) {
    return a > b;
  }
};
struct GreaterOrEqual {
  template <class C>
  static __device__ bool of(C a, C b) {
    return a >= b;
  }
};
struct And {
  template <class C>
  static __device__ bool of(C a, C b) {
    return a != C(0) && b != C(0);
  }
};
struct Or {
  template <class C>
  static __device__ bool of(C a, C b) {
    return a != C(0) || b != C(0);
  }
};
struct Xor {
  template <class C>
  static __device__ bool of(C a, C b) {
    return (a != C(0)) != (b != C(0));
  }
};

// gate * sigmoid(gate) * up, rounded to Y wherever the separate nodes would.
struct SiluMul {
  template <class Y>
  static __device__ float rounded(float gate, float up) {
    float open = widen(narrow<Y>(1.f / (1.f + expf(-gate))));
    return widen(narrow<Y>(gate * open)) * up;
  }
};

template <class Op, class C, class Y>
__device__ inline auto applied(C a, C b) {
  if constexpr (Same<Op, SiluMul>::value)
    return SiluMul::rounded<Y>(a, b);
  else
    return Op::template of<C>(a, b);
}

template <class Op, class A, class B, class Y>
__global__ void binary(const A* a, const B* b, Y* y, i64 n) {
  i64 i = thread_index();
  typedef typename Computed<A>::type C;
  if (i < n) y[i] = narrow<Y>(applied<Op, C, Y>(widen(a[i]), static_cast<C>(widen(b[i]))));
}

template <class Op, class A, class B, class Y>
__global__ void binary_strided(const A* a, const B* b, Y* y, i64 n, WALK, STRIDES(a), STRIDES(b)) {
  i64 i = thread_index();
  typedef typename Computed<A>::type C;
  if (i >= n) return;
  UNRAVEL(i);
  y[i] = narrow<Y>(applied<Op, C, Y>(widen(a[OFFSET(a)]), static_cast<C>(widen(b[OFFSET(b)]))));
}

template <class T>
__global__ void where(const bool* condition, const T* a, const T* b, T* y, i64 n, WALK, STRIDES(c), STRIDES(a),
                      STRIDES(b)) {
  i64 i = thread_index();
  if (i >= n) return;
  UNRAVEL(i);
  y[i] = condition[OFFSET(c)] ? a[OFFSET(a)] : b[OFFSET(b)];
}

// x + round(y * gate)
template <class T>
__global__ void gated_add(const T* x, const T* y, const T* gate, T* out, i64 n, WALK, STRIDES(x), STRIDES(y),
                          STRIDES(g)) {
  i64 i = thread_index();
  if (i >= n) return;
  UNRAVEL(i);
  float product = widen(narrow<T>(widen(y[OFFSET(y)]) * widen(gate[OFFSET(g)])));
  out[i] = narrow<T>(widen(x[OFFSET(x)]) + product);
}

// ---- one operand
struct Neg {
  template <class C>
  static __device__ C of(C x, float) {
    return -x;
  }
};
struct Abs {
  template <class C>
  static __device__ C of(C x, float) {
    if constexpr (IsFloat<C>::value) return fabs(x);
    return x < C(0) ? -x : x;
  }
};
struct Relu {
  template <class C>
  static __device__ C of(C x, float) {
    return x < C(0) ? C(0) : x;
  }
};
struct Sign {
  template <class C>
  static __device__ C of(C x, float) {
    return x > C(0) ? C(1) : x < C(0) ? C(-1) : x;
  }
};
struct Not {
  template <class C>
  static __device__ C of(C x, float) {
    return x == C(0);
  }
};
struct Exp {
  static __device__ float of(float x, float) { return expf(x); }
};
struct Log {
  static __device__ float of(float x, float) { return logf(x); }
};
struct Sqrt {
  static __device__ float of(float x, float) { return sqrtf(x); }
};
struct Reciprocal {
  static __device__ float of(float x, float) { return 1.f / x; }
};
struct Erf {
  static __device__ float of(float x, float) { return erff(x); }
};
struct Sin {
  static __device__ float of(float x, float) { return sinf(x); }
};
struct Cos {
  static __device__ float of(float x, float) { return cosf(x); }
};
struct Tanh {
  static __device__ float of(float x, float) { return tanhf(x); }
};
struct Floor {
  static __device__ float of(float x, float) { return floorf(x); }
};
struct Ceil {
  static __device__ float of(float x, float) { return ceilf(x); }
};
struct Round {  // half to even
  static __device__ float of(float x, float) { return rintf(x); }
};
struct Sigmoid {
  static __device__ float of(float x, float) { return 1.f / (1.f + expf(-x)); }
};
struct Softplus {
  static __device__ float of(float x, float) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }
};
struct Swish {  // x sigmoid(alpha x); QuickGelu is the same with alpha 1.702
  static __device__ float of(float x, float alpha) { return x / (1.f + expf(-alpha * x)); }
};
struct GeluErf {
  static __device__ float of(float x, float) { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }
};
struct GeluTanh {
  static __device__ float of(float x, float) {
    return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  }
};

template <class Op, class T>
__global__ void unary(const T* x, T* y, i64 n, float alpha) {
  i64 i = thread_index();
  if (i < n) y[i] = narrow<T>(Op::of(widen(x[i]), alpha));
}

// x [..., E] + bias [E], then the function.
template <class Op, class T>
__global__ void biased(const T* x, const T* bias, T* y, i64 n, i64 width) {
  i64 i = thread_index();
  if (i < n) y[i] = narrow<T>(Op::of(widen(x[i]) + widen(bias[i % width]), 0.f));
}

// Limits on the device win over those of the attributes.
template <class T>
__global__ void clip(const T* x, const T* low, const T* high, T* y, i64 n, double low_value, double high_value) {
  typedef typename Computed<T>::type C;
  i64 i = thread_index();
  if (i >= n) return;
  C value = widen(x[i]);
  if (low) {
    if (value < widen(*low)) value = widen(*low);
  } else if (IsFloat<C>::value && value < C(low_value)) {
    value = C(low_value);
  }
  if (high) {
    if (value > widen(*high)) value = widen(*high);
  } else if (IsFloat<C>::value && value > C(high_value)) {
    value = C(high_value);
  }
  y[i] = narrow<T>(value);
}

// ---- Cast
// Floats become integers by truncation, clamped to [low, high]; NaN becomes 0.
template <class Y>
__device__ inline Y to_integer(double value, double low, double high) {
  if (value != value) return Y(0);
  if (value <= low) return Y(static_cast<i64>(low));
  if (value >= high) return sizeof(Y) == 8 ? Y(~(u64(1) << 63)) : Y(static_cast<i64>(high));
  return Y(static_cast<i64>(value));
}

template <class X, class Y>
__global__ void cast(const X* x, Y* y, i64 n, double low, double high) {
  typedef typename Computed<X>::type CX;
  typedef typename Computed<Y>::type CY;
  i64 i = thread_index();
  if (i >= n) return;
  CX value = widen(x[i]);
  if constexpr (Same<Y, bool>::value) {
    y[i] = value != CX(0);
  } else if constexpr (IsFloat<CX>::value && !IsFloat<CY>::value) {
    y[i] = to_integer<Y>(static_cast<double>(value), low, high);
  } else {
    y[i] = narrow<Y>(static_cast<CY>(value));
  }
}
