// The inner loops: sums of products for a few rows of activations and one or two tiles of weights.
//
// Every sum is one chain of multiply-adds in the order of K, kept in registers or, between pieces of K, in memory. So a
// result depends neither on the number of rows nor on how rows, tiles and K are cut.
#pragma once

#include "linear/formats.h"

namespace noria::NORIA_ISA {

constexpr int kUnitTiles = 2;                     // tiles that are worked on together
constexpr int kSumStride = kUnitTiles * kLanes;   // between the sums of two rows

// The sums of M rows and J tiles. Every index is a constant, so that they live in registers.
template <int M, int J>
struct Sums {
  Lanes at[M][J];

  inline NORIA_INLINE void begin(const float* sums, bool first) {
    each([&](auto m, auto j) NORIA_INLINE { at[m][j] = first ? zero() : load(sums + m * kSumStride + j * kLanes); });
  }
  inline NORIA_INLINE void end(float* sums) const {
    each([&](auto m, auto j) NORIA_INLINE { store(sums + m * kSumStride + j * kLanes, at[m][j]); });
  }
  template <typename F>
  static inline NORIA_INLINE void each(F&& f) {
    unroll<M>([&](auto m) NORIA_INLINE { unroll<J>([&](auto j) NORIA_INLINE { f(m, j); }); });
  }
};

template <typename T, int M>
struct RowPointers {
  const T* row[M];
  inline NORIA_INLINE RowPointers(const T* x, int64_t stride) {
    unroll<M>([&](auto m) NORIA_INLINE { row[m] = x + m * stride; });
  }
  inline NORIA_INLINE const T* operator[](int m) const { return row[m]; }
};

// Asks for what lies some way ahead: the processor's own guesses end with each page of memory, and begin anew.
template <int bytes>
inline NORIA_INLINE void prefetch(const uint8_t* block) {
  constexpr int kAhead = 3072;  // bytes; between 1024 and 4096 little changes
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(block + kAhead + at);
}

// sums[m][j] += x[m] times tile j, over `blocks` blocks; the sums begin at zero if `first`.
template <typename Format, int M, int J>
inline void accumulate(const uint8_t* tile, int64_t tile_stride, int64_t blocks, const float* x, int64_t row_stride,
                       float* sums, bool first) {
  Sums<M, J> acc;
  acc.begin(sums, first);
  const RowPointers<float, M> row(x, row_stride);
  for (int64_t b = 0; b < blocks; ++b, tile += Format::kBytes) {
    const int64_t start = b * Format::kBlock;
    unroll<J>([&](auto j) NORIA_INLINE { prefetch<Format::kBytes>(tile + j * tile_stride); });
    unroll<J>([&](auto j) NORIA_INLINE {
      Format::visit(tile + j * tile_stride, [&](int64_t k, Lanes w) NORIA_INLINE {
        k += start;
        unroll<M>([&](auto m) NORIA_INLINE {
          acc.at[m][j] = fma(row[m] + k, w, acc.at[m][j]);
        });
      });
    });
  }
  acc.end(sums);
}

// float32 weights, or others already expanded: J tiles element by element, so that an activation is loaded once.
template <int M, int J>
inline void accumulate_dense(const uint8_t* tile, int64_t tile_stride, int64_t count, const float* x,
                             int64_t row_stride, float* sums, bool first) {
  Sums<M, J> acc;
  acc.begin(sums, first);
  const RowPointers<float, M> row(x, row_stride);
  const auto* w = reinterpret_cast<const float*>(tile);
  for (int64_t k = 0; k < count; k += 4, w += 4 * kLanes) {
    unroll<4>([&](auto i) NORIA_INLINE {
      Lanes wide[J];
      unroll<J>([&](auto j) NORIA_INLINE { wide[j] = load(w + j * (tile_stride / 4) + i * kLanes); });
      unroll<M>([&](auto m) NORIA_INLINE {
        unroll<J>([&](auto j) NORIA_INLINE {
          acc.at[m][j] = fma(row[m] + k + i, wide[j], acc.at[m][j]);
        });
      });
    });
  }
  acc.end(sums);
}

#ifdef __AVX512BF16__
// bfloat16 activations and weights, two products at a time.
template <int M, int J>
inline void accumulate_pairs(const uint8_t* tile, int64_t tile_stride, int64_t count, const uint16_t* x,
                             int64_t row_stride, float* sums, bool first) {
  Sums<M, J> acc;
  acc.begin(sums, first);
  const RowPointers<uint16_t, M> row(x, row_stride);
  for (int64_t k = 0; k < count; k += 4, tile += 128) {
    unroll<2>([&](auto i) NORIA_INLINE {
      Words wide[J];
      unroll<J>([&](auto j) NORIA_INLINE { wide[j] = load_words(tile + j * tile_stride + i * 64); });
      unroll<M>([&](auto m) NORIA_INLINE {
        unroll<J>([&](auto j) NORIA_INLINE {
          acc.at[m][j] = dot2(row[m] + k + 2 * i, wide[j], acc.at[m][j]);
        });
      });
    });
  }
  acc.end(sums);
}
#endif

// 8-bit activations: per sub-block an exact integer sum of activations times centred codes, then
// sum += scale * (x scale) * integer and, with minima, + offset * (x sum). The sums begin at zero if `first`.
template <typename Format, int M>
inline void accumulate_x8(const uint8_t* tile, int64_t blocks, Quantized x, int64_t row_stride, float* sums,
                          bool first) {
  Sums<M, 1> acc;
  acc.begin(sums, first);
  constexpr int kParts = Format::kBlock / 32, kSubs = 32 / Format::kSub, kCentre = Format::kCentre;
  for (int64_t b = 0; b < blocks; ++b, tile += Format::kBytes) {
    if constexpr (Format::kStreamed) prefetch<Format::kBytes>(tile);
    for (int part = 0; part < kParts; ++part, x = advance(x, 32)) {
      Words integer[M];
      const auto begin = [&](int sub) NORIA_INLINE {
        unroll<M>([&](auto m) NORIA_INLINE {
          integer[m] = begin_dot4<kCentre>(x.shared[m * (row_stride / 32)].less[kSubs == 2 ? sub : 2]);
        });
      };
      const auto end = [&](int sub) NORIA_INLINE {
        const Affine a = Format::centred(tile, part * kSubs + sub);
        unroll<M>([&](auto m) NORIA_INLINE {
          Lanes& sum = acc.at[m][0];
          const SharedBy32& shared = x.shared[m * (row_stride / 32)];
          sum = fma(to_lanes(end_dot4<kCentre>(integer[m])), mul(a.scale, splat(shared.scale)), sum);
          if constexpr (Format::kMinima) sum = fma(&shared.sum, a.offset, sum);
        });
      };
      begin(0);
      Format::visit_part(tile, part, [&](auto group, Words codes) NORIA_INLINE {
        unroll<M>([&](auto m) NORIA_INLINE {
          integer[m] = dot4<kCentre>(x.q + m * row_stride + 4 * group, codes, integer[m]);
        });
        if (kSubs == 2 && group == 3) {
          end(0);
          begin(1);
        }
      });
      end(kSubs - 1);
    }
  }
  acc.end(sums);
}

}  // namespace noria::NORIA_ISA
