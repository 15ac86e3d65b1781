// How each kind of weight lies in memory, and how 16 outputs of it are read.
//
// A tile holds 16 outputs (lanes) and all of K. Along K it is cut into blocks; element k of lane n lies at
//   float32   [k][n] of 4 bytes
//   bfloat16  [k / 2][n][k % 2] of 2 bytes, so that a 32-bit word holds two neighbours of one lane
//   codes     [k / 4][n][k % 4] of 8 bits each: a word w of lane n holds codes 4w .. 4w + 3. Codes of fewer bits are
//             split: for 32 elements, four words of nibbles (word i: codes of words 2i in the low and 2i + 1 in the
//             high nibbles), then the fifth bits in one word (bit w of byte j: code 4w + j), or the upper two bits in two
//             (bits 2(w % 4) of byte j of word w / 4).
// The blocks of ggml are kept: same codes, same half-precision scales, in an order that a register can load. The 6-bit
// scales of Q4_K and Q5_K are widened to bytes. Every code c stands for c * scale + offset, one rounding.
#pragma once

#include "linear/types.h"
#include "simd/loops.h"

namespace noria::NORIA_ISA {

// A format has: kBlock, kBytes, kHeader as in Shape, and visit(block, f), which calls f(k, lanes) for each k in order.
template <Kind kind>
struct Layout {
  static constexpr int kBlock = shape_of(kind).block;
  static constexpr int kBytes = shape_of(kind).block_bytes;
  static constexpr int kHeader = shape_of(kind).tile_header;
  static constexpr Kind kKind = kind;
};

struct Float32 : Layout<Kind::kFloat32> {
  template <typename F>
  static inline NORIA_INLINE void visit(const uint8_t* block, F&& f) {
    unroll<kBlock>([&](auto k) NORIA_INLINE {
      f(int64_t{k}, load(reinterpret_cast<const float*>(block) + k * kLanes));
    });
  }
};

struct BFloat16 : Layout<Kind::kBFloat16> {
  template <typename F>
  static inline NORIA_INLINE void visit(const uint8_t* block, F&& f) {
    unroll<kBlock / 2>([&](auto pair) NORIA_INLINE {
      const Words w = load_words(block + pair * 64);
      f(int64_t{2 * pair}, as_lanes(shift_left<16>(w)));
      f(int64_t{2 * pair + 1}, as_lanes(bit_and(w, 0xffff0000u)));
    });
  }
};

// Calls f(group, words) for 32 codes, in order: group g holds codes 4g .. 4g + 3 as 4 bytes a lane. A loop, not unrolled:
// two groups of it are enough work for one turn, and the code stays small.
template <int bits, typename F>
inline NORIA_INLINE void visit_codes(const uint8_t* body, F&& f) {
  if constexpr (bits == 8) {
    for (int group = 0; group < 8; ++group) f(group, load_words(body + group * 64));
  } else {
    Words high = bits == 4 ? zero_words() : load_words(body + 256);
    for (int i = 0; i < 4; ++i) {
      const Words nibbles = load_words(body + i * 64);
      Words even = bit_and(nibbles, 0x0f0f0f0fu), odd = bit_and(shift_right<4>(nibbles), 0x0f0f0f0fu);
      if constexpr (bits == 5) {
        even = bit_or(even, shift_left<4>(bit_and(high, 0x01010101u)));
        odd = bit_or(odd, shift_left<3>(bit_and(high, 0x02020202u)));
        high = shift_right<2>(high);
      } else if constexpr (bits == 6) {
        even = bit_or(even, shift_left<4>(bit_and(high, 0x03030303u)));
        odd = bit_or(odd, shift_left<2>(bit_and(high, 0x0c0c0c0cu)));
        high = i == 1 ? load_words(body + 320) : shift_right<4>(high);
      }
      f(2 * i, even);
      f(2 * i + 1, odd);
    }
  }
}

struct Affine {
  Lanes scale, offset;
};

// What the formats of codes share. A Scales has kBytes, the size of a block's scales, kSub, the elements along K that
// share one, kMinima, whether its offsets are more than the scale times a code that stands for zero, and at(block, i),
// the scales of the i-th such sub-block.
template <Kind kind, int bits, typename Scales>
struct Coded : Layout<kind> {
  static constexpr int kSub = Scales::kSub;
  static constexpr int kBodyBytes = 64 * bits;  // of 32 elements
  // 8-bit activations are multiplied with codes less kCentre: that is the code of zero, or keeps sums small.
  static constexpr bool kMinima = Scales::kMinima, kStreamed = true;  // streamed: read once, from memory
  static constexpr int kCentre = kMinima && bits == 4 ? 0 : 1 << (bits - 1);
  static_assert(Layout<kind>::kBytes == Scales::kBytes + Layout<kind>::kBlock / 32 * kBodyBytes);

  // Codes of the 32 elements that begin at 32 * part.
  static inline const uint8_t* body(const uint8_t* block, int part) {
    return block + Scales::kBytes + part * kBodyBytes;
  }
  static inline NORIA_INLINE Affine affine(const uint8_t* block, int sub) {
    return Scales::at(block, sub);
  }
  // Of codes less kCentre; no offset without minima.
  static inline NORIA_INLINE Affine centred(const uint8_t* block, int sub) {
    const Affine a = affine(block, sub);
    return {a.scale, kMinima && kCentre > 0 ? fma(a.scale, splat(kCentre), a.offset) : a.offset};
  }

  template <typename F>
  static inline NORIA_INLINE void visit(const uint8_t* block, F&& f) {
    for (int part = 0; part < Layout<kind>::kBlock / 32; ++part) {
      Affine a = affine(block, part * (32 / kSub));
      visit_codes<bits>(body(block, part), [&](int group, Words w) NORIA_INLINE {
        if (kSub == 16 && group == 4) a = affine(block, part * 2 + 1);
        const int64_t k = part * 32 + group * 4;
        f(k, fma(to_lanes(bit_and(w, 255)), a.scale, a.offset));
        f(k + 1, fma(to_lanes(bit_and(shift_right<8>(w), 255)), a.scale, a.offset));
        f(k + 2, fma(to_lanes(bit_and(shift_right<16>(w), 255)), a.scale, a.offset));
        f(k + 3, fma(to_lanes(shift_right<24>(w)), a.scale, a.offset));
      });
    }
  }

  template <typename F>
  static inline NORIA_INLINE void visit_part(const uint8_t* block, int part, F&& f) {
    visit_codes<bits>(body(block, part), f);
  }
};

// int8: the scale of each output stands in the tile's header and multiplies the finished sum.
struct UnitScales {
  static constexpr int kBytes = 0, kSub = 32;
  static constexpr bool kMinima = false;
  static inline Affine at(const uint8_t*, int) { return {splat(1.0f), splat(-128.0f)}; }
};

// Half-precision scale; codes are centred on `zero`.
template <int zero>
struct CentredScales {
  static constexpr int kBytes = 32, kSub = 32;
  static constexpr bool kMinima = false;
  static inline Affine at(const uint8_t* block, int) {
    const Lanes d = from_half(block);
    return {d, mul(d, splat(-zero))};
  }
};

// Half-precision scale and minimum.
struct MinScales {
  static constexpr int kBytes = 64, kSub = 32;
  static constexpr bool kMinima = true;
  static inline Affine at(const uint8_t* block, int) { return {from_half(block), from_half(block + 32)}; }
};

// Half-precision scales of the scales and of the minima, which are 8 bytes each.
struct KScales {
  static constexpr int kBytes = 320, kSub = 32;
  static constexpr bool kMinima = true;
  static inline Affine at(const uint8_t* block, int sub) {
    const Lanes d = from_half(block), dmin = mul(from_half(block + 32), splat(-1.0f));
    return {mul(d, from_u8(block + 64 + sub * 16)), mul(dmin, from_u8(block + 192 + sub * 16))};
  }
};

struct K6Scales {
  static constexpr int kBytes = 288, kSub = 16;
  static constexpr bool kMinima = false;
  static inline Affine at(const uint8_t* block, int sub) {
    const Lanes scale = mul(from_half(block), from_i8(block + 32 + sub * 16));
    return {scale, mul(scale, splat(-32.0f))};
  }
};

using Int8 = Coded<Kind::kInt8, 8, UnitScales>;
using Q8_0 = Coded<Kind::kQ8_0, 8, CentredScales<128>>;
using Q4_0 = Coded<Kind::kQ4_0, 4, CentredScales<8>>;
using Q4_1 = Coded<Kind::kQ4_1, 4, MinScales>;
using Q5_0 = Coded<Kind::kQ5_0, 5, CentredScales<16>>;
using Q5_1 = Coded<Kind::kQ5_1, 5, MinScales>;
using Q4_K = Coded<Kind::kQ4_K, 4, KScales>;
using Q5_K = Coded<Kind::kQ5_K, 5, KScales>;
using Q6_K = Coded<Kind::kQ6_K, 6, K6Scales>;

// Codes expanded to a byte each and scales to floats, for many rows that are multiplied with the same: blocks of 32
// elements, the codes as [8 groups][16 lanes][4 codes], then scale and, with minima, offset of each sub-block.
template <int sub_block, int centre, bool minima>
struct Bytes {
  static constexpr int kBlock = 32, kSub = sub_block, kCentre = centre;
  static constexpr bool kMinima = minima, kStreamed = false;
  static constexpr int kCodeBytes = kBlock * kLanes, kAffineBytes = (minima ? 2 : 1) * kLanes * sizeof(float);
  static constexpr int kBytes = kCodeBytes + kBlock / kSub * kAffineBytes;

  template <typename Format>
  static void expand(const uint8_t* tile, int64_t blocks, uint8_t* out) {
    for (int64_t b = 0; b < blocks; ++b, tile += Format::kBytes) {
      for (int part = 0; part < Format::kBlock / kBlock; ++part, out += kBytes) {
        Format::visit_part(tile, part, [&](int group, Words codes) NORIA_INLINE { store_words(out + group * 64, codes); });
        for (int sub = 0; sub < kBlock / kSub; ++sub) {
          const Affine a = Format::centred(tile, part * (kBlock / kSub) + sub);
          float* to = reinterpret_cast<float*>(out + kCodeBytes + sub * kAffineBytes);
          store(to, a.scale);
          if (minima) store(to + kLanes, a.offset);
        }
      }
    }
  }
  static inline NORIA_INLINE Affine centred(const uint8_t* block, int sub) {
    const float* from = reinterpret_cast<const float*>(block + kCodeBytes + sub * kAffineBytes);
    return {load(from), minima ? load(from + kLanes) : zero()};
  }
  template <typename F>
  static inline NORIA_INLINE void visit_part(const uint8_t* block, int, F&& f) {
    unroll<8>([&](auto group) NORIA_INLINE { f(group, load_words(block + group * 64)); });
  }
};

// Calls f with an empty object of the format of that kind.
template <typename F>
inline void with_format(Kind kind, F&& f) {
  switch (kind) {
    case Kind::kFloat32: return f(Float32{});
    case Kind::kBFloat16: return f(BFloat16{});
    case Kind::kInt8: return f(Int8{});
    case Kind::kQ8_0: return f(Q8_0{});
    case Kind::kQ4_0: return f(Q4_0{});
    case Kind::kQ4_1: return f(Q4_1{});
    case Kind::kQ5_0: return f(Q5_0{});
    case Kind::kQ5_1: return f(Q5_1{});
    case Kind::kQ4_K: return f(Q4_K{});
    case Kind::kQ5_K: return f(Q5_K{});
    case Kind::kQ6_K: return f(Q6_K{});
  }
}

}  // namespace noria::NORIA_ISA
