// Sixteen lanes as plain arrays: runs everywhere, and is what the other paths are tested against.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef NORIA_INLINE
#define NORIA_INLINE  // small and quick to compile matters more here than fast
#endif

namespace noria::NORIA_ISA {

constexpr int kMaxRows = 2;
constexpr int kDirectRows = 1;  // up to so many rows codes are expanded in registers
constexpr int kDirectRowsDot4 = 1, kMaxRowsDot4 = 1;  // the same of 8-bit activations
constexpr bool kHasDot2 = false;
constexpr int tiles_together(int) { return 1; }

struct Lanes {
  float v[16];
};
struct Words {
  uint32_t v[16];
};

#define NORIA_EACH(type, expression)                  \
  type r;                                             \
  for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
  return r

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // XLA's threads may treat subnormal floats as zero, so subnormal halves must not pass through any.
  const float magnitude = rest < 0x400 ? static_cast<float>(rest) * 0x1p-24f : bits_to_float((rest << 13) + (112u << 23));
  return bits_to_float(sign | float_to_bits(magnitude));
}

inline Lanes splat(float x) { NORIA_EACH(Lanes, x); }
inline Lanes zero() { return splat(0.0f); }
inline Lanes load(const float* p) { NORIA_EACH(Lanes, p[i]); }
inline void store(float* p, Lanes a) { std::memcpy(p, a.v, sizeof a.v); }
inline Lanes add(Lanes a, Lanes b) { NORIA_EACH(Lanes, a.v[i] + b.v[i]); }
inline Lanes mul(Lanes a, Lanes b) { NORIA_EACH(Lanes, a.v[i] * b.v[i]); }
inline Lanes div(Lanes a, Lanes b) { NORIA_EACH(Lanes, a.v[i] / b.v[i]); }
// The second argument when either is NaN.
inline Lanes max(Lanes a, Lanes b) { NORIA_EACH(Lanes, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Lanes min(Lanes a, Lanes b) { NORIA_EACH(Lanes, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { NORIA_EACH(Lanes, a.v[i] * b.v[i] + c.v[i]); }
inline Lanes fma(const float* x, Lanes w, Lanes sum) { NORIA_EACH(Lanes, *x * w.v[i] + sum.v[i]); }
inline Lanes round_even(Lanes a) { NORIA_EACH(Lanes, std::nearbyintf(a.v[i])); }

inline float max_of(Lanes a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

inline Words zero_words() { NORIA_EACH(Words, 0); }
inline Words load_words(const void* p) {
  Words r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store_words(void* p, Words a) { std::memcpy(p, a.v, sizeof a.v); }
// The low byte of each.
inline void store_bytes(void* p, Words a) {
  for (int i = 0; i < 16; ++i) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(a.v[i]);
}
inline Words bit_and(Words a, uint32_t mask) { NORIA_EACH(Words, a.v[i] & mask); }
inline Words bit_or(Words a, Words b) { NORIA_EACH(Words, a.v[i] | b.v[i]); }
template <int n>
inline Words shift_right(Words a) {
  NORIA_EACH(Words, a.v[i] >> n);
}
template <int n>
inline Words shift_left(Words a) {
  NORIA_EACH(Words, a.v[i] << n);
}
inline Words add_words(Words a, uint32_t b) { NORIA_EACH(Words, a.v[i] + b); }
inline Words add_words(Words a, Words b) { NORIA_EACH(Words, a.v[i] + b.v[i]); }
inline Words bit_xor(Words a, Words b) { NORIA_EACH(Words, a.v[i] ^ b.v[i]); }
inline Lanes to_lanes(Words a) { NORIA_EACH(Lanes, static_cast<float>(static_cast<int32_t>(a.v[i]))); }
// Like the vector conversions: what does not fit 32 bits, NaN included, gives the lowest integer.
inline uint32_t round_to_word(float x) {
  if (!(x >= -0x1p31f && x < 0x1p31f)) return 0x80000000u;
  return static_cast<uint32_t>(static_cast<int32_t>(std::nearbyintf(x)));
}
inline Words to_words(Lanes a) { NORIA_EACH(Words, round_to_word(a.v[i])); }
inline Lanes as_lanes(Words a) { NORIA_EACH(Lanes, bits_to_float(a.v[i])); }
inline Words as_words(Lanes a) { NORIA_EACH(Words, float_to_bits(a.v[i])); }

inline Lanes from_half(const void* p) {
  uint16_t half[16];
  std::memcpy(half, p, sizeof half);
  NORIA_EACH(Lanes, half_to_float(half[i]));
}
inline Lanes from_bfloat16(const void* p) {
  uint16_t half[16];
  std::memcpy(half, p, sizeof half);
  NORIA_EACH(Lanes, bits_to_float(static_cast<uint32_t>(half[i]) << 16));
}
// To the nearest, ties to even; a NaN stays one.
inline void store_bfloat16(void* p, Lanes a) {
  uint16_t half[16];
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = float_to_bits(a.v[i]);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    half[i] = static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  std::memcpy(p, half, sizeof half);
}
inline Lanes from_u8(const void* p) { NORIA_EACH(Lanes, static_cast<const uint8_t*>(p)[i]); }
inline Lanes from_i8(const void* p) { NORIA_EACH(Lanes, static_cast<const int8_t*>(p)[i]); }

// to[i][j] = rows[j][from + i], i and j below 16.
inline void transpose(const float* const (&rows)[16], int64_t from, float* to) {
  for (int j = 0; j < 16; ++j)
    for (int i = 0; i < 16; ++i) std::memcpy(to + 16 * i + j, rows[j] + from + i, sizeof(float));
}

// Exact integer sums of 8-bit activations times codes less `centre`: one without products, one with those of 4
// activations and 4 unsigned codes a lane added, and one as 32-bit integers. Codes of 8 bits have the centre 128.
// less: of the activations, see SharedBy32.
template <int centre>
inline Words begin_dot4(const int16_t (&less)[2]) {
  NORIA_EACH(Words, static_cast<uint32_t>(centre * (less[0] + less[1])));
}
template <int centre>
inline Words dot4(const int8_t* x, Words codes, Words sum) {
  for (int i = 0; i < 16; ++i) {
    int32_t s = 0;
    for (int j = 0; j < 4; ++j) s += x[j] * static_cast<int32_t>(codes.v[i] >> 8 * j & 255);
    sum.v[i] += static_cast<uint32_t>(s);
  }
  return sum;
}
template <int centre>
inline Words end_dot4(Words sum) {
  return sum;
}

#undef NORIA_EACH

}  // namespace noria::NORIA_ISA
