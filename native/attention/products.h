// Products of a few rows with panels of 16 columns, each sum one chain in the order of the depth.
#pragma once

#include "simd/loops.h"

namespace noria::NORIA_ISA {

struct Extent {
  int64_t rows, depth, panels;
};
struct Operand {
  const float* data;
  int64_t stride;  // between rows; of the second operand between panels, each [depth][16]
};
struct Sums16 {
  float* data;
  int64_t stride;  // between rows
};

// Panels that are summed together: few rows alone have too few independent sums to hide the latency of a multiply-add.
constexpr int panels_together(int rows) {
  constexpr int most = kMaxRows * tiles_together(kMaxRows);  // sums that registers hold
  return 4 * rows <= most ? 4 : 2 * rows <= most ? 2 : 1;
}

// fade: for each row, what its sums so far are multiplied with first; null: they begin at zero.
template <int M, int J>
void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, Sums16 sums,
              const float* fade) {
  Lanes sum[M][J];
  const float* row[M];
  const float* panel[J];
  unroll<M>([&](auto m) NORIA_INLINE { row[m] = a + m * a_stride; });
  unroll<J>([&](auto j) NORIA_INLINE { panel[j] = b + j * b_stride; });
  unroll<M>([&](auto m) NORIA_INLINE {
    unroll<J>([&](auto j) NORIA_INLINE {
      sum[m][j] = fade ? mul(load(sums.data + m * sums.stride + j * kLanes), splat(fade[m])) : zero();
    });
  });
  for (int64_t k = 0; k < depth; ++k) {
    unroll<J>([&](auto j) NORIA_INLINE {
      const Lanes column = load(panel[j] + k * kLanes);
      unroll<M>([&](auto m) NORIA_INLINE { sum[m][j] = fma(row[m] + k, column, sum[m][j]); });
    });
  }
  unroll<M>([&](auto m) NORIA_INLINE {
    unroll<J>([&](auto j) NORIA_INLINE { store(sums.data + m * sums.stride + j * kLanes, sum[m][j]); });
  });
}

// sums = sums * fade + a b
inline void product(Extent extent, Operand a, Operand b, Sums16 sums, const float* fade) {
  // Many rows go through the panels one after the other, so that a panel stays in the first-level cache.
  const int64_t step = extent.rows <= kMaxRows ? extent.panels : panels_together(kMaxRows);
  for (int64_t first = 0; first < extent.panels; first += step) {
    const int64_t last = first + step < extent.panels ? first + step : extent.panels;
    each_group<kMaxRows>(extent.rows, [&](int64_t row, auto m) NORIA_INLINE {
      constexpr int together = panels_together(m);
      const auto run = [&](int64_t panel, auto j) NORIA_INLINE {
        multiply<m, j>(a.data + row * a.stride, a.stride, b.data + panel * b.stride, b.stride, extent.depth,
                       {sums.data + row * sums.stride + panel * kLanes, sums.stride}, fade ? fade + row : nullptr);
      };
      int64_t panel = first;
      for (; panel + together <= last; panel += together) run(panel, std::integral_constant<int, together>{});
      for (; panel < last; ++panel) run(panel, std::integral_constant<int, 1>{});
    });
  }
}

}  // namespace noria::NORIA_ISA
