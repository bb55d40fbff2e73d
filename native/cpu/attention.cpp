#include "cpu/attention.h"

#include <cmath>

#include "cpu/attention_keys.h"
#include "cpu/lanes.h"
#include "cpu/rotary.h"
#include "cpu/scratch.h"

namespace genai::GENAI_ISA {
namespace {

struct Memory;
struct ValueMemory;
struct PartialMemory;

float exponential_of(float x) { return exponential(all(x))[0]; }

// Softmax over some keys, not yet divided: maximum, sum of exponentials, weighted values [value_dim].
struct Partial {
  float max = -INFINITY, sum = 0;
  float* values = nullptr;

  void merge(const Partial& next, int64_t n) {
    if (next.max == -INFINITY) return;
    float top = max > next.max ? max : next.max;
    float keep = max == -INFINITY ? 0.0f : exponential_of(max - top), take = exponential_of(next.max - top);
    max = top;
    sum = sum * keep + next.sum * take;
    for (int64_t i = 0; i < n; ++i) values[i] = values[i] * keep + next.values[i] * take;
  }
};

// Some queries of one key-value head: what a thread works on. Buffers are padded to whole vectors.
struct Tile {
  int64_t kv_head, first_head, num_heads, first_token, num_tokens;  // rows are [token][head]
  int64_t num_rows() const { return num_tokens * num_heads; }
  int64_t token(int64_t row) const { return first_token + row / num_heads; }
  int64_t head(int64_t row) const { return first_head + row % num_heads; }
};

// Calls f(integral_constant<n>) for a compile-time n = `rest` in [1, N]; nothing for 0.
template <int N, class F>
void with_rest(int64_t rest, F&& f) {
  if constexpr (N > 0) {
    if (rest == N) return f(std::integral_constant<int, N>{});
    with_rest<N - 1>(rest, f);
  }
}

class Worker {
 public:
  Worker(const Attention& attention, const KeyValue& kv, int64_t past_len)
      : a_(attention), kv_(kv), past_len_(past_len) {}

  Span span(int64_t token) const {
    int64_t position = past_len_ + token;
    int64_t end = a_.right < 0 ? kv_.num_keys : std::clamp<int64_t>(position + a_.right + 1, 0, kv_.num_keys);
    return {a_.left < 0 ? 0 : std::clamp<int64_t>(position - a_.left, 0, end), end};
  }

  // All keys of a tile, written to the output.
  void attend(const Tile& tile) const {
    int64_t rows = tile.num_rows(), width = padded(a_.value_dim);
    float* memory = scratch<float, Memory>(tile_floats() + 2 * kTileRows * width);
    float *queries = memory, *scores = queries + kTileRows * padded(a_.head_dim);
    float *now = scores + kTileRows * kSplit, *total = now + kTileRows * width;
    Partial totals[kTileRows], partials[kTileRows];
    load_queries(tile, queries);
    for (int64_t row = 0; row < rows; ++row) totals[row].values = clear(total + row * width, width);
    Span keys = keys_of(tile);
    for (int64_t split = keys.begin / kSplit; split * kSplit < keys.end; ++split) {
      for (int64_t row = 0; row < rows; ++row) partials[row] = {-INFINITY, 0, clear(now + row * width, width)};
      attend_split(tile, split, queries, scores, partials);
      for (int64_t row = 0; row < rows; ++row) totals[row].merge(partials[row], width);
    }
    for (int64_t row = 0; row < rows; ++row) finish(tile, row, totals[row]);
  }

  // One split of a tile, left in `partials` [rows].
  void attend_partly(const Tile& tile, int64_t split, Partial* partials) const {
    float* queries = scratch<float, Memory>(tile_floats());
    load_queries(tile, queries);
    attend_split(tile, split, queries, queries + kTileRows * padded(a_.head_dim), partials);
  }

  Span keys_of(const Tile& tile) const {
    return {span(tile.first_token).begin, span(tile.first_token + tile.num_tokens - 1).end};
  }

  void finish(const Tile& tile, int64_t row, Partial total) const {
    int64_t head = tile.head(row), width = padded(a_.value_dim);
    if (a_.sink || a_.smooth) {
      float sink = 0;
      if (a_.sink) read_block(a_.sink.data, a_.sink.dtype, head, 1, &sink);
      float top = sink > total.max ? sink : total.max;
      float keep = total.max == -INFINITY ? 0.0f : exponential_of(total.max - top);
      total.sum = total.sum * keep + exponential_of(sink - top);
      for (int64_t i = 0; i < width; ++i) total.values[i] *= keep;
    }
    float divisor = total.sum > 0 || total.sum != total.sum ? total.sum : 1.0f;  // every key masked: zeros
    for (int64_t i = 0; i < a_.value_dim; ++i) total.values[i] /= divisor;
    write_block(a_.output.data, a_.output.dtype,
                tile.token(row) * a_.output.token_stride + head * a_.output.head_stride, a_.value_dim, total.values);
  }

 private:
  int64_t tile_floats() const { return kTileRows * (padded(a_.head_dim) + kSplit); }

  static float* clear(float* values, int64_t n) {
    std::fill(values, values + n, 0.0f);
    return values;
  }

  void load_queries(const Tile& tile, float* queries) const {
    int64_t width = padded(a_.head_dim);
    for (int64_t row = 0; row < tile.num_rows(); ++row) {
      float* to = queries + row * width;
      std::fill(to + a_.head_dim, to + width, 0.0f);
      a_.transform.load(a_.query, tile.token(row), tile.head(row), a_.head_dim, past_len_, to);
    }
  }

  void attend_split(const Tile& tile, int64_t split, const float* queries, float* scores, Partial* partials) const {
    switch (kv_.key.dtype) {
      case DType::f16:
        return attend_typed<half_t>(tile, split, queries, scores, partials);
      case DType::bf16:
        return attend_typed<bfloat_t>(tile, split, queries, scores, partials);
      default:
        return attend_typed<float>(tile, split, queries, scores, partials);
    }
  }

  template <class T>
  void attend_typed(const Tile& tile, int64_t split, const float* queries, float* scores, Partial* partials) const {
    int64_t start = split * kSplit, rows = tile.num_rows();
    Span all_keys = keys_of(tile);
    Span keys{std::max(all_keys.begin, start), std::min(all_keys.end, start + kSplit)};
    if (keys.begin >= keys.end) return;
    const T* key = static_cast<const T*>(kv_.key.data) + tile.kv_head * kv_.key.head_stride;
    const T* value = static_cast<const T*>(kv_.value.data) + tile.kv_head * kv_.value.head_stride;
    // By sixteen, as long as there are that many: scores of keys that no row sees are not looked at.
    int64_t first = keys.begin / kLanes * kLanes, last = std::min(padded(keys.end), kv_.num_keys);
    score_keys(queries, rows, key + first * kv_.key.token_stride, kv_.key.token_stride, a_.head_dim, last - first,
               scores + first - start);
    Span spans[kTileRows];
    for (int64_t row = 0; row < rows; ++row) {
      Span seen = span(tile.token(row));
      spans[row] = {std::clamp<int64_t>(seen.begin - start, 0, kSplit),
                    std::clamp<int64_t>(seen.end - start, 0, kSplit)};
      weigh_scores(tile, row, start, spans[row], scores + row * kSplit, partials[row]);
    }
    value += start * kv_.value.token_stride;
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows)
      add_values<kRows>(scores + row * kSplit, spans + row, value, partials[row].values);
    with_rest<kRows - 1>(rows - row, [&](auto rest) {
      add_values<rest.value>(scores + row * kSplit, spans + row, value, partials[row].values);
    });
  }

  // Rows that see different keys take the shared ones together, and each its own before and after.
  template <int R, class T>
  void add_values(const float* weights, const Span* spans, const T* value, float* values) const {
    int64_t width = padded(a_.value_dim);
    Span shared = spans[0];
    for (int i = 1; i < R; ++i) shared = {std::max(shared.begin, spans[i].begin), std::min(shared.end, spans[i].end)};
    bool overlap = shared.begin < shared.end;
    for (int i = 0; i < R; ++i) {
      Span before{spans[i].begin, overlap ? shared.begin : spans[i].end};
      weigh_rows<1>(weights + i * kSplit, before, value, kv_.value.token_stride, a_.value_dim, values + i * width);
    }
    if (!overlap) return;
    weigh_rows<R>(weights, shared, value, kv_.value.token_stride, a_.value_dim, values);
    for (int i = 0; i < R; ++i) {
      weigh_rows<1>(weights + i * kSplit, {shared.end, spans[i].end}, value, kv_.value.token_stride, a_.value_dim,
                    values + i * width);
    }
  }

  // Raw scores of the keys in `seen` become exp(score - max), their maximum and sum.
  void weigh_scores(const Tile& tile, int64_t row, int64_t start, Span seen, float* scores, Partial& partial) const {
    if (seen.begin >= seen.end) return;
    // Whole vectors at fixed positions: keys the row does not see count as -inf.
    int64_t first = seen.begin / kLanes * kLanes, last = padded(seen.end);
    for (int64_t j = first; j < seen.begin; ++j) scores[j] = 0;
    for (int64_t j = seen.end; j < last; ++j) scores[j] = 0;
    bool bias_first = a_.bias.tensor && a_.bias_before_softcap;
    for (int64_t j = first; j < last; j += kLanes) store(scores + j, load(scores + j) * a_.scale);
    if (bias_first) add_bias(tile, row, start, seen, scores);
    if (a_.softcap > 0) {
      map_lanes(scores + first, scores + first, last - first,
                [cap = a_.softcap](v16 x) { return hyperbolic_tangent(x / cap) * cap; });
    }
    if (a_.bias.tensor && !bias_first) add_bias(tile, row, start, seen, scores);
    for (int64_t j = first; j < seen.begin; ++j) scores[j] = -INFINITY;
    for (int64_t j = seen.end; j < last; ++j) scores[j] = -INFINITY;
    v16 top = all(-INFINITY), sound = all(0.0f);
    for (int64_t j = first; j < last; j += kLanes) {
      v16 score = load(scores + j);
      top = larger(score, top);
      sound = select(score == score, sound, score);  // keeps a NaN, which is never larger
    }
    partial.max = any_nan(sound) ? NAN : max_lanes(top);
    if (partial.max == -INFINITY) {
      std::fill(scores + first, scores + last, 0.0f);
      return;
    }
    v16 sum{};
    for (int64_t j = first; j < last; j += kLanes) {
      v16 score = load(scores + j);
      v16 weight = select(score == -INFINITY, v16{}, exponential(score - partial.max));
      store(scores + j, weight);
      sum += weight;
    }
    partial.sum = sum_lanes(sum);
  }

  void add_bias(const Tile& tile, int64_t row, int64_t start, Span seen, float* scores) const {
    const ScoreBias& bias = a_.bias;
    int64_t base = tile.head(row) * bias.head_stride + tile.token(row) * bias.token_stride;
    alignas(64) float block[kSplit];
    int64_t n = seen.end - seen.begin;
    if (bias.key_stride == 0) {
      read_block(bias.tensor.data, bias.tensor.dtype, base, 1, block);
      std::fill(block + 1, block + n, block[0]);
    } else {
      read_block(bias.tensor.data, bias.tensor.dtype, base + start + seen.begin, n, block);
    }
    bool mask = bias.tensor.dtype == DType::boolean;
    for (int64_t i = 0; i < n; ++i) {
      float& score = scores[seen.begin + i];
      score = mask ? (block[i] != 0 ? score : -INFINITY) : score + block[i];
    }
  }

  const Attention& a_;
  const KeyValue& kv_;
  int64_t past_len_;
};

}  // namespace

HeadRows head_rows(const Tensor& tensor, int64_t num_heads, int64_t head_dim, int64_t first) {
  HeadRows rows{static_cast<char*>(tensor.data) + first * size_of(tensor.dtype), tensor.dtype};
  if (tensor.shape.size() == 4) {
    rows.token_stride = head_dim;
    rows.head_stride = tensor.shape[2] * head_dim;
  } else {
    rows.token_stride = tensor.shape.back();
    rows.head_stride = head_dim;
  }
  return rows;
}

ScoreBias score_bias(const Tensor& tensor, int64_t batch, int64_t num_heads, int64_t num_tokens) {
  if (!tensor) return {};
  if (tensor.dtype != DType::boolean) want_float(tensor, "attention bias");
  Shape shape = tensor.shape;
  if (shape.size() > 4) refuse("the attention bias is " + describe(tensor) + ", wanted at most 4 dimensions");
  shape.insert(shape.begin(), 4 - shape.size(), 1);
  auto fits = [](int64_t dim, int64_t wanted) { return dim == 1 || dim == wanted; };
  if (!fits(shape[0], batch) || !fits(shape[1], num_heads) || !fits(shape[2], num_tokens)) {
    refuse("the attention bias is " + describe(tensor) + ", wanted " + describe({batch, num_heads, num_tokens}) +
           " and keys, or ones");
  }
  ScoreBias bias{tensor};
  bias.num_keys = shape[3];
  bias.key_stride = shape[3] == 1 ? 0 : 1;
  bias.token_stride = shape[2] == 1 ? 0 : shape[3];
  bias.head_stride = shape[1] == 1 ? 0 : shape[2] * shape[3];
  bias.batch_stride = shape[0] == 1 ? 0 : shape[1] * shape[2] * shape[3];
  return bias;
}

int64_t RowTransform::position(int64_t past_len, int64_t token) const {
  return position_ids ? integer_at(position_ids, token) : past_len + token;
}

void RowTransform::load(const HeadRows& rows, int64_t token, int64_t head, int64_t head_dim, int64_t past_len,
                        float* to) const {
  constexpr int64_t kMost = 1024;
  alignas(64) float first[kMost], second[kMost];
  auto round = [&] {
    if (rows.dtype == DType::f32) return;
    write_block(first, rows.dtype, 0, head_dim, to);
    read_block(first, rows.dtype, 0, head_dim, to);
  };
  read_block(rows.data, rows.dtype, token * rows.token_stride + head * rows.head_stride, head_dim, to);
  if (norm) {
    double squares = sum_of(to, head_dim, [](d8 x) { return x * x; });
    float inverse = static_cast<float>(1.0 / std::sqrt(squares / head_dim + epsilon));
    const float* weight = block_of(norm, 0, head_dim, first);
    for (int64_t i = 0; i < head_dim; ++i) to[i] = to[i] * inverse * weight[i];
    round();
  }
  if (cos) {
    int64_t half = cos.shape[1], at = position(past_len, token);
    if (at < 0 || at >= cos.shape[0]) {
      throw std::out_of_range("position " + std::to_string(at) + " is outside a rotary cache of " +
                              std::to_string(cos.shape[0]));
    }
    rotate_row(to, half, block_of(cos, at * half, half, first), block_of(sin, at * half, half, second), interleaved);
    round();
  }
}

namespace {

// How the rows of an attention are cut into tiles.
struct Tiling {
  int64_t kv_num_heads, num_tokens, group, heads, tokens, columns, rows;

  explicit Tiling(const Attention& a)
      : kv_num_heads(a.kv_num_heads),
        num_tokens(a.num_tokens),
        group(a.num_heads / a.kv_num_heads),
        heads(std::min(group, kTileRows)),
        tokens(std::max<int64_t>(1, kTileRows / group)),
        columns((group + heads - 1) / heads),
        rows((num_tokens + tokens - 1) / tokens) {}

  int64_t size() const { return kv_num_heads * columns * rows; }

  Tile operator[](int64_t unit) const {
    // Under a causal mask late tiles cost more: early and late ones alternate, so that equal shares are equal work.
    int64_t i = unit % rows, place = (i % 2 ? rows - 1 - i / 2 : i / 2) * tokens;
    int64_t column = unit / rows % columns * heads, kv_head = unit / rows / columns;
    return {kv_head, kv_head * group + column, std::min(heads, group - column), place,
            std::min(tokens, num_tokens - place)};
  }
};

// Few tiles, many keys: threads share the splits of a tile, which are merged afterwards in their order.
void run_by_splits(ThreadPool& pool, const Worker& worker, const Tiling& tiling, int64_t num_splits, int64_t width) {
  int64_t jobs = tiling.size() * num_splits;
  float* values = scratch<float, ValueMemory>(jobs * kTileRows * width);
  Partial* partials = scratch<Partial, PartialMemory>(jobs * kTileRows);
  std::fill(values, values + jobs * kTileRows * width, 0.0f);
  for (int64_t i = 0; i < jobs * kTileRows; ++i) partials[i] = {-INFINITY, 0, values + i * width};
  pool.parallel_for(jobs, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t job = begin; job < end; ++job) {
      worker.attend_partly(tiling[job / num_splits], job % num_splits, partials + job * kTileRows);
    }
  });
  for (int64_t unit = 0; unit < tiling.size(); ++unit) {
    Tile tile = tiling[unit];
    for (int64_t row = 0; row < tile.num_rows(); ++row) {
      Partial* first = partials + unit * num_splits * kTileRows + row;
      for (int64_t split = 1; split < num_splits; ++split) first->merge(first[split * kTileRows], width);
      worker.finish(tile, row, *first);
    }
  }
}

}  // namespace

void Attention::run_head(const KeyValue& kv, int64_t token, int64_t position, int64_t kv_head) const {
  Worker worker(*this, kv, position - token);
  int64_t group = num_heads / kv_num_heads;
  for (int64_t head = 0; head < group; head += kTileRows) {
    worker.attend({kv_head, kv_head * group + head, std::min(kTileRows, group - head), token, 1});
  }
}

void Attention::run(ThreadPool& pool, const KeyValue& kv, int64_t past_len) const {
  Worker worker(*this, kv, past_len);
  Tiling tiling(*this);
  int64_t num_splits = (kv.num_keys + kSplit - 1) / kSplit;
  if (tiling.size() < 4 * pool.size() && num_splits > 1 && pool.size() > 1) {
    return run_by_splits(pool, worker, tiling, num_splits, padded(value_dim));
  }
  // A thread is worth waking for about 16k multiplications.
  int64_t work = std::min(tiling.tokens, num_tokens) * tiling.heads * kv.num_keys * (head_dim + value_dim);
  pool.parallel_for(tiling.size(), 1 + 16384 / (1 + work), [&](int64_t begin, int64_t end, int) {
    for (int64_t unit = begin; unit < end; ++unit) worker.attend(tiling[unit]);
  });
}

}  // namespace genai::GENAI_ISA
