// KV rows between buffers whose heads are `to_stride` and `from_stride` rows apart: read-out, seed, growth.
template <int BYTES>
struct Unit;
template <>
struct Unit<16> {
  typedef uint4 type;
};
template <>
struct Unit<8> {
  typedef uint2 type;
};
template <>
struct Unit<4> {
  typedef unsigned type;
};
template <>
struct Unit<2> {
  typedef unsigned short type;
};
template <>
struct Unit<1> {
  typedef unsigned char type;
};

// A row is `units` units; `count` rows of each of `heads` heads.
template <int BYTES>
__global__ void move_rows(typename Unit<BYTES>::type* to, const typename Unit<BYTES>::type* from, i64 heads, i64 count,
                          i64 units, i64 to_stride, i64 from_stride) {
  i64 i = thread_index();
  if (i >= heads * count * units) return;
  i64 unit = i % units, row = i / units % count, head = i / units / count;
  to[(head * to_stride + row) * units + unit] = from[(head * from_stride + row) * units + unit];
}
