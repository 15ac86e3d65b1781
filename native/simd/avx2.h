// Sixteen lanes as two AVX2 registers; needs AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

// Callbacks too must be inlined, or the sums would leave their registers.
#ifndef NORIA_INLINE
#define NORIA_INLINE __attribute__((always_inline))
#endif

namespace noria::NORIA_ISA {

constexpr int kMaxRows = 6;       // 6 rows x 2 registers of sums, 2 of weights, 1 activation: 15 of 16 registers
constexpr int kDirectRows = 4;    // of codes: 4 x 2 registers of sums, 2 of codes, 2 of weights, and what is left for the rest
constexpr int kDirectRowsDot4 = 3;  // the same of 8-bit activations: sums of a sub-block beside the sums of all
constexpr int kMaxRowsDot4 = 4;     // of expanded codes: between sub-blocks the sums of all go to memory
constexpr bool kHasDot2 = false;
// Tiles of float32 that are summed together.
constexpr int tiles_together(int rows) { return rows == 1 ? 2 : 1; }

struct Lanes {
  __m256 lo, hi;
};
struct Words {
  __m256i lo, hi;
};

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
// The second argument when either is NaN.
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Lanes fma(const float* x, Lanes w, Lanes sum) {
  const __m256 a = _mm256_broadcast_ss(x);
  return {_mm256_fmadd_ps(a, w.lo, sum.lo), _mm256_fmadd_ps(a, w.hi, sum.hi)};
}
inline Lanes round_even(Lanes a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}

inline float max_of(Lanes a) {
  const __m256 v = _mm256_max_ps(a.lo, a.hi);
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Words load_words(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_words(void* p, Words a) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}
// The low byte of each.
inline void store_bytes(void* p, Words a) {
  const __m256i mask = _mm256_set1_epi32(255);
  const __m256i both = _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask));
  const __m256i ordered = _mm256_permute4x64_epi64(both, 0xd8);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
inline Words bit_and(Words a, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
inline Words bit_or(Words a, Words b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int n>
inline Words shift_right(Words a) {
  return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
template <int n>
inline Words shift_left(Words a) {
  return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
inline Words add_words(Words a, uint32_t b) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(b));
  return {_mm256_add_epi32(a.lo, v), _mm256_add_epi32(a.hi, v)};
}
inline Words add_words(Words a, Words b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Words bit_xor(Words a, Words b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline Lanes to_lanes(Words a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Words to_words(Lanes a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Lanes as_lanes(Words a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Words as_words(Lanes a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

inline Lanes from_half(const void* p) {
  const auto* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline Lanes from_bfloat16(const void* p) {
  const auto* q = static_cast<const __m128i*>(p);
  const auto wide = [](__m128i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); };
  return {wide(_mm_loadu_si128(q)), wide(_mm_loadu_si128(q + 1))};
}
// To the nearest, ties to even; a NaN stays one.
inline void store_bfloat16(void* p, Lanes a) {
  const auto narrow = [](__m256 v) {
    const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  };
  const __m256i both = _mm256_packus_epi32(narrow(a.lo), narrow(a.hi));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
inline Lanes from_u8(const void* p) {
  const __m128i a = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return to_lanes({_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))});
}
inline Lanes from_i8(const void* p) {
  const __m128i a = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return to_lanes({_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))});
}

// A compiler that adds integers in another order, as it may, first gathers more of them than there are registers.
inline NORIA_INLINE Words in_this_order(Words sum) {
  __asm__("" : "+x"(sum.lo), "+x"(sum.hi));
  return sum;
}

// Exact integer sums of 8-bit activations times codes less `centre`: one without products, one with those of 4
// activations and 4 unsigned codes a lane added, and one as 32-bit integers. Codes of 8 bits have the centre 128.
// less: of the activations, see SharedBy32.
//
// Except for codes of 8 bits each lane has two 16-bit sums. They may wrap around meanwhile: with the centre subtracted,
// those of a sub-block fit (16 products of 127 and 16, or 8 of 127 and 32).
inline __m256i splat_four(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
template <int centre>
inline Words begin_dot4(const int16_t (&less)[2]) {
  if constexpr (centre == 0 || centre == 128) return zero_words();  // dot4 subtracts 128
  const __m256i sums = _mm256_mullo_epi16(splat_four(less), _mm256_set1_epi16(centre));
  return {sums, sums};
}
template <int centre>
inline Words dot4(const int8_t* x, Words codes, Words sum) {
  const __m256i a = splat_four(x);
  if constexpr (centre == 128) {  // |c - 128| times x with its sign: two such products fit the 16 bits of maddubs
    const auto half = [&](__m256i c, __m256i s) {
      const __m256i w = _mm256_xor_si256(c, _mm256_set1_epi8(-128));
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
      return _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    };
    return in_this_order({half(codes.lo, sum.lo), half(codes.hi, sum.hi)});
  } else {
    return in_this_order({_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(codes.lo, a)),
                          _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(codes.hi, a))});
  }
}
template <int centre>
inline Words end_dot4(Words sum) {
  if constexpr (centre == 128) return sum;
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sum.lo, ones), _mm256_madd_epi16(sum.hi, ones)};
}

}  // namespace noria::NORIA_ISA

#include "simd/transpose_x86.h"
