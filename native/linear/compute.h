// The whole op: activations prepared, units of work shared among threads, rows finished.
#pragma once

#include <cmath>
#include <cstring>

#include "linear/types.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace noria {

constexpr int64_t kSmallWork = 1 << 17;      // multiply-adds below which waking a thread costs more than it gains
constexpr int64_t kSmallRows = 1 << 15;      // the same for elements of rows that are prepared or finished
constexpr int64_t kRowsTogether = 8;
constexpr int64_t kManyRows = 16;            // that copying them to a better place pays

struct Input {
  const void* x;  // [rows, k]
  Dtype dtype;
  bool x8;    // as 8-bit integers
  Norm norm;  // of each row, before anything else; what it gives is rounded to dtype
};

// Places for the rows of x in the forms that a problem asks for; null for a form that is not asked for or needs no copy.
struct Prepared {
  float* x;
  uint16_t* x16;
};

// Sets row_stride and the x of a problem whose weights are known. The places are the calling thread's scratch memory.
inline Prepared place_rows(const Input& in, const Kernels& kernels, Problem* p) {
  int64_t block = in.x8 ? 32 : 1;
  for (int i = 0; i < p->weights; ++i) {
    const int64_t own = shape_of(p->weight[i].kind).block;
    block = own > block ? own : block;  // all blocks are powers of two
  }
  p->row_stride = ceil_div(p->k, block) * block;
  // Rows whose addresses differ by a multiple of a page compete for the same few places in the first-level cache.
  if (p->rows >= kManyRows && p->row_stride % 512 == 0) p->row_stride += 32;
  const int64_t count = p->rows * p->row_stride;
  const bool wide = in.dtype == Dtype::kFloat32, changed = p->row_stride != p->k || in.norm.scale != nullptr;
  Prepared to{};
  to.x = wide && !changed ? nullptr : scratch<float, 0>(count);
  p->x = to.x ? to.x : static_cast<const float*>(in.x);
  if (!wide && kernels.takes_pairs && !in.x8) {
    to.x16 = changed ? scratch<uint16_t, 0>(count) : nullptr;
    p->x16 = to.x16 ? to.x16 : static_cast<const uint16_t*>(in.x);
  }
  if (in.x8) p->x8 = {scratch<int8_t, 0>(count), scratch<SharedBy32, 0>(count / 32)};
  return to;
}

inline void prepare_row(const Input& in, const Kernels& kernels, const Problem& p, const Prepared& to, int64_t row) {
  const int64_t k = p.k, at = row * p.row_stride;
  if (to.x) {
    float* x = to.x + at;
    const float* from = x;
    if (in.dtype == Dtype::kBFloat16) {
      kernels.widen(static_cast<const uint16_t*>(in.x) + row * k, k, x);
    } else {
      from = static_cast<const float*>(in.x) + row * k;
      if (!in.norm.scale) std::memcpy(x, from, k * sizeof(float));
    }
    if (in.norm.scale) {
      kernels.normalize(from, k, in.norm, x);
      if (in.dtype == Dtype::kBFloat16) {
        uint16_t* rounded = scratch<uint16_t, 1>(k);
        kernels.narrow(x, k, rounded);
        kernels.widen(rounded, k, x);
      }
    }
    std::memset(x + k, 0, (p.row_stride - k) * sizeof(float));
  }
  if (to.x16) kernels.narrow(to.x + at, p.row_stride, to.x16 + at);
  if (p.x8.q) kernels.quantize(p.x + at, p.row_stride, advance(p.x8, at));
}

// From `raw` to the result.
inline void finish_row(const Kernels& kernels, const Problem& p, int64_t row) {
  const int64_t n = p.weight[0].outputs, size = p.y_dtype == Dtype::kFloat32 ? 4 : 2;
  float* raw = p.raw + row * n;
  uint8_t* y = static_cast<uint8_t*>(p.weight[0].y) + row * n * size;
  kernels.normalize(raw, n, p.post_norm, raw);
  if (p.residual)
    kernels.add_residual(raw, n, static_cast<const uint8_t*>(p.residual) + row * n * size, y, p.y_dtype);
  else if (p.y_dtype == Dtype::kFloat32)
    std::memcpy(y, raw, n * sizeof(float));
  else
    kernels.narrow(raw, n, reinterpret_cast<uint16_t*>(y));
}

// Calls work(row) for all rows of `width` elements.
template <typename Pool, typename Work>
void each_row(Pool& pool, int64_t rows, int64_t width, int64_t threads, const Work& work) {
  parallel(pool, rows, rows * width < kSmallRows ? 1 : threads, kRowsTogether, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) work(row);
  });
}

// All that is known of the problem but its x, raw and best, which are made here. pool: has Schedule(function).
template <typename Pool>
void compute(Pool& pool, const Kernels& kernels, const Input& in, int64_t threads, Problem* p) {
  const Prepared to = place_rows(in, kernels, p);
  if (to.x || to.x16 || p->x8.q)
    each_row(pool, p->rows, p->k, threads, [&](int64_t row) { prepare_row(in, kernels, *p, to, row); });
  const int64_t n = p->weight[0].outputs;
  if (p->post_norm.scale) p->raw = scratch<float, 3>(p->rows * n);
  int64_t work = 0;
  for (int i = 0; i < p->weights; ++i) work += p->rows * p->k * p->weight[i].outputs;
  parallel(pool, kernels.units(*p), work < kSmallWork ? 1 : threads, 1,
           [&](int64_t first, int64_t last) { kernels.run(*p, first, last); });
  if (p->raw) each_row(pool, p->rows, n, threads, [&](int64_t row) { finish_row(kernels, *p, row); });
}

// The largest output of each row, the first of equals; -1 for a row whose largest is no finite number.
template <typename Pool>
void compute_argmax(Pool& pool, const Kernels& kernels, const Input& in, int64_t threads, Problem* p, int32_t* largest) {
  const int64_t units = kernels.units_per_row_block(*p);
  p->best = reinterpret_cast<Best*>(scratch<uint64_t, 0>(p->rows * units));
  static_assert(sizeof(Best) == sizeof(uint64_t), "one word for each");
  compute(pool, kernels, in, threads, p);
  for (int64_t row = 0; row < p->rows; ++row) {
    Best best = p->best[row * units];
    for (int64_t unit = 1; unit < units; ++unit) {
      const Best other = p->best[row * units + unit];
      if (other.value > best.value || std::isnan(other.value)) best = other;
    }
    largest[row] = std::isfinite(best.value) ? best.output : -1;
  }
}

}  // namespace noria
