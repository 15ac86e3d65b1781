// From a problem to its inner loops: how rows, tiles and K are cut into pieces that stay in the caches.
//
// Included once for each instruction set, by a file that defines NORIA_ISA and includes the lanes for it.
#pragma once

#include "linear/finish.h"
#include "linear/sums.h"

namespace noria::NORIA_ISA {

#ifdef __AVX512BF16__
constexpr bool kTakesPairs = true;
#else
constexpr bool kTakesPairs = false;
#endif
constexpr int64_t kRowBlock = 96;   // rows whose activations should stay in the second-level cache
constexpr int64_t kChunk = 256;     // elements along K of an expanded tile: 16 KiB, half a first-level cache

// Up to so many rows are multiplied with weights as they come from memory, expanded in registers.
template <typename Format>
constexpr int direct_rows() {
  return Format::kKind == Kind::kBFloat16 ? kMaxRows : kDirectRows;
}
// Expanding bfloat16 costs next to nothing: doing it again for each group of rows is cheaper than a detour through memory.
template <typename Format>
constexpr int direct_groups() {
  return Format::kKind == Kind::kBFloat16 ? 3 : 1;
}

// Calls f(tile, J, stride): the tiles of a unit, J of them together, `stride` bytes apart. An odd last tile is taken
// twice where two go together, which is rare, and halves the code.
template <int together, typename F>
inline NORIA_INLINE void each_tiles(int tiles, int64_t stride, F&& f) {
  if constexpr (together == 2) {
    f(0, std::integral_constant<int, 2>{}, tiles == 2 ? stride : 0);
  } else {
    for (int tile = 0; tile < tiles; ++tile) f(tile, std::integral_constant<int, 1>{}, stride);
  }
}

// Where the rows of a piece of work begin.
struct Rows {
  const Problem& problem;
  int64_t first, count;
  const float* x() const { return problem.x + first * problem.row_stride; }
};

template <typename Format>
void expand(const uint8_t* tile, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b, tile += Format::kBytes, out += Format::kBlock * kLanes)
    Format::visit(tile, [&](int k, Lanes w) NORIA_INLINE { store(out + k * kLanes, w); });
}

// Few rows: codes go from memory to registers to the sums.
template <typename Format>
void sum_direct(const Rows& rows, const uint8_t* tile, int64_t stride, int tiles, int64_t blocks, float* sums) {
  each_group<direct_rows<Format>()>(rows.count, [&](int64_t row, auto m) NORIA_INLINE {
    // One row alone has too few independent sums to hide the latency of a multiply-add.
    each_tiles<m == 1 ? 2 : 1>(tiles, stride, [&](int t, auto j, int64_t apart) NORIA_INLINE {
      accumulate<Format, m, j>(tile + t * stride, apart, blocks, rows.x() + row * rows.problem.row_stride,
                               rows.problem.row_stride, sums + row * kSumStride + t * kLanes, true);
    });
  });
}

// Many rows: a chunk of the tiles is expanded once and used for all of them.
template <typename Format>
void sum_expanded(const Rows& rows, const uint8_t* tile, int64_t stride, int tiles, int64_t blocks, float* sums) {
  constexpr bool dense = Format::kKind == Kind::kFloat32;
  constexpr int64_t chunk_blocks = kChunk / Format::kBlock;
  alignas(64) float expanded[dense ? 1 : kUnitTiles * kChunk * kLanes];
  for (int64_t b = 0; b < blocks; b += chunk_blocks) {
    const int64_t count = blocks - b < chunk_blocks ? blocks - b : chunk_blocks, k = b * Format::kBlock;
    const uint8_t* source = tile + b * Format::kBytes;
    int64_t source_stride = stride;
    if constexpr (!dense) {
      for (int t = 0; t < tiles; ++t) expand<Format>(source + t * stride, count, expanded + t * kChunk * kLanes);
      source = reinterpret_cast<const uint8_t*>(expanded);
      source_stride = kChunk * kLanes * sizeof(float);
    }
    each_group<kMaxRows>(rows.count, [&](int64_t row, auto m) NORIA_INLINE {
      each_tiles<tiles_together(m)>(tiles, source_stride, [&](int t, auto j, int64_t apart) NORIA_INLINE {
        accumulate_dense<m, j>(source + t * source_stride, apart, count * Format::kBlock,
                               rows.x() + row * rows.problem.row_stride + k, rows.problem.row_stride,
                               sums + row * kSumStride + t * kLanes, b == 0);
      });
    });
  }
}

#ifdef __AVX512BF16__
void sum_pairs(const Rows& rows, const uint8_t* tile, int64_t stride, int tiles, int64_t blocks, float* sums) {
  constexpr int64_t chunk_blocks = 2 * kChunk / BFloat16::kBlock;
  const int64_t row_stride = rows.problem.row_stride;
  const uint16_t* x = rows.problem.x16 + rows.first * row_stride;
  for (int64_t b = 0; b < blocks; b += chunk_blocks) {
    const int64_t count = blocks - b < chunk_blocks ? blocks - b : chunk_blocks;
    each_group<kMaxRows>(rows.count, [&](int64_t row, auto m) NORIA_INLINE {
      each_tiles<tiles_together(m)>(tiles, stride, [&](int t, auto j, int64_t apart) NORIA_INLINE {
        accumulate_pairs<m, j>(tile + t * stride + b * BFloat16::kBytes, apart, count * BFloat16::kBlock,
                               x + row * row_stride + b * BFloat16::kBlock, row_stride,
                               sums + row * kSumStride + t * kLanes, b == 0);
      });
    });
  }
}
#endif

// 8-bit activations. Codes of few rows come as they are; of many, a chunk of the tiles is expanded once for all of them.
template <typename Format>
void sum_x8(const Rows& rows, const uint8_t* tile, int64_t stride, int tiles, int64_t blocks, float* sums) {
  const Problem& p = rows.problem;
  const auto sum = [&](auto format, auto most, const uint8_t* source, int64_t source_stride, int64_t count, int64_t k) {
    each_group<most>(rows.count, [&](int64_t row, auto m) NORIA_INLINE {
      const Quantized x = advance(p.x8, (rows.first + row) * p.row_stride + k);
      for (int t = 0; t < tiles; ++t)
        accumulate_x8<decltype(format), m>(source + t * source_stride, count, x, p.row_stride,
                                           sums + row * kSumStride + t * kLanes, k == 0);
    });
  };
  constexpr std::integral_constant<int, kDirectRowsDot4> few{};
  constexpr std::integral_constant<int, kMaxRowsDot4> many{};
  if (rows.count <= few) return sum(Format{}, few, tile, stride, blocks, 0);
  using Expanded = Bytes<Format::kSub, Format::kCentre, Format::kMinima>;
  constexpr int64_t chunk_blocks = kChunk / Format::kBlock, parts = Format::kBlock / 32;
  constexpr int64_t expanded_stride = kChunk / 32 * Expanded::kBytes;
  alignas(64) uint8_t expanded[kUnitTiles * expanded_stride];
  for (int64_t b = 0; b < blocks; b += chunk_blocks) {
    const int64_t count = blocks - b < chunk_blocks ? blocks - b : chunk_blocks;
    for (int t = 0; t < tiles; ++t)
      Expanded::template expand<Format>(tile + t * stride + b * Format::kBytes, count, expanded + t * expanded_stride);
    sum(Expanded{}, many, expanded, expanded_stride, count * parts, b * Format::kBlock);
  }
}

// Sums of `rows` with the `tiles` (1 or 2) tiles of a weight that begin at `first_tile`, scaled: [rows][kSumStride].
void sum_tiles(const Rows& rows, const Weight& weight, int64_t first_tile, int tiles, float* sums) {
  with_format(weight.kind, [&](auto format) {
    using Format = decltype(format);
    const int64_t stride = tile_bytes(Format::kKind, rows.problem.k);
    const int64_t blocks = ceil_div(rows.problem.k, Format::kBlock);
    const uint8_t* tile = weight.data + first_tile * stride + Format::kHeader;
    if constexpr (Format::kKind == Kind::kFloat32) {
      sum_expanded<Format>(rows, tile, stride, tiles, blocks, sums);
    } else if constexpr (Format::kKind == Kind::kBFloat16) {
#ifdef __AVX512BF16__
      if (rows.problem.x16) return sum_pairs(rows, tile, stride, tiles, blocks, sums);
#endif
      if (rows.count <= direct_groups<Format>() * direct_rows<Format>()) return sum_direct<Format>(rows, tile, stride, tiles, blocks, sums);
      sum_expanded<Format>(rows, tile, stride, tiles, blocks, sums);
    } else {
      if (rows.problem.x8.q) {
        sum_x8<Format>(rows, tile, stride, tiles, blocks, sums);
      } else if (rows.count <= direct_groups<Format>() * direct_rows<Format>()) {
        sum_direct<Format>(rows, tile, stride, tiles, blocks, sums);
      } else {
        sum_expanded<Format>(rows, tile, stride, tiles, blocks, sums);
      }
      if constexpr (Format::kHeader > 0) {
        for (int t = 0; t < tiles; ++t) {
          const Lanes scale = load(reinterpret_cast<const float*>(tile - Format::kHeader + t * stride));
          for (int64_t row = 0; row < rows.count; ++row) {
            float* at = sums + row * kSumStride + t * kLanes;
            store(at, mul(load(at), scale));
          }
        }
      }
    }
  });
}

int64_t weight_units(const Problem& problem, int index) {
  return ceil_div(ceil_div(problem.weight[index].outputs, kLanes), kUnitTiles);
}
int results(const Problem& problem) { return problem.activation == Activation::kNone ? problem.weights : 1; }
int64_t units_per_row_block(const Problem& problem) {
  int64_t total = 0;
  for (int i = 0; i < results(problem); ++i) total += weight_units(problem, i);
  return total;
}

int64_t units(const Problem& problem) { return ceil_div(problem.rows, kRowBlock) * units_per_row_block(problem); }

// One unit: up to kRowBlock rows and kUnitTiles tiles of one result.
void run_unit(const Problem& problem, int64_t unit) {
  alignas(64) float sums[2][kRowBlock * kSumStride];
  const int64_t per_block = units_per_row_block(problem), blocks = ceil_div(problem.rows, kRowBlock);
  const int64_t block = unit / per_block;
  const int64_t first = block * problem.rows / blocks, end = (block + 1) * problem.rows / blocks;
  const Rows rows{problem, first, end - first};
  int64_t at = unit % per_block;
  int index = 0;
  for (; at >= weight_units(problem, index); ++index) at -= weight_units(problem, index);
  const int64_t tile = at * kUnitTiles, rest = ceil_div(problem.weight[index].outputs, kLanes) - tile;
  const int tiles = rest < kUnitTiles ? static_cast<int>(rest) : kUnitTiles;
  sum_tiles(rows, problem.weight[index], tile, tiles, sums[0]);
  const bool gated = problem.activation != Activation::kNone;
  if (problem.best)
    for (int64_t row = first; row < end; ++row) problem.best[row * per_block + unit % per_block] = {-INFINITY, 0};
  if (gated) sum_tiles(rows, problem.weight[1], tile, tiles, sums[1]);
  for (int t = 0; t < tiles; ++t) {
    const Piece piece{first, end - first, (tile + t) * kLanes, kSumStride, unit % per_block, per_block};
    finish(problem, index, piece, sums[0] + t * kLanes, gated ? sums[1] + t * kLanes : nullptr);
  }
}

void run(const Problem& problem, int64_t first, int64_t last) {
  for (int64_t unit = first; unit < last; ++unit) run_unit(problem, unit);
}

void row(Kind kind, const uint8_t* tile, int lane, int64_t k, float* y) {
  with_format(kind, [&](auto format) {
    using Format = decltype(format);
    alignas(64) float expanded[Format::kBlock * kLanes];
    float scale = 1.0f;
    if constexpr (Format::kHeader > 0) scale = reinterpret_cast<const float*>(tile)[lane];
    const uint8_t* block = tile + Format::kHeader;
    for (int64_t at = 0; at < k; at += Format::kBlock, block += Format::kBytes) {
      expand<Format>(block, 1, expanded);
      for (int64_t i = 0; i < Format::kBlock && at + i < k; ++i) y[at + i] = expanded[i * kLanes + lane] * scale;
    }
  });
}

}  // namespace noria::NORIA_ISA
