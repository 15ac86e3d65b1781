// Sixteen lanes as one AVX-512 register; needs F, BW, VL, DQ and VNNI, and uses BF16 where compiled for it.
#pragma once

#include <immintrin.h>

#include <cstdint>

// Callbacks too must be inlined, or the sums would leave their registers.
#ifndef NORIA_INLINE
#define NORIA_INLINE __attribute__((always_inline))
#endif

namespace noria::NORIA_ISA {

constexpr int kMaxRows = 12;  // 12 rows x 2 tiles of sums, 2 of weights: 26 of 32 registers
constexpr int kDirectRows = 4;  // up to so many rows codes are expanded in registers
constexpr int kDirectRowsDot4 = 4, kMaxRowsDot4 = 4;  // the same of 8-bit activations
constexpr int tiles_together(int) { return 2; }

struct Lanes {
  __m512 v;
};
struct Words {
  __m512i v;
};

inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
// The second argument when either is NaN.
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes fma(const float* x, Lanes w, Lanes sum) { return {_mm512_fmadd_ps(_mm512_set1_ps(*x), w.v, sum.v)}; }
inline Lanes round_even(Lanes a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline float max_of(Lanes a) { return _mm512_reduce_max_ps(a.v); }

inline Words zero_words() { return {_mm512_setzero_si512()}; }
inline Words load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_words(void* p, Words a) { _mm512_storeu_si512(p, a.v); }
// The low byte of each.
inline void store_bytes(void* p, Words a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline Words bit_and(Words a, uint32_t mask) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(mask)))};
}
inline Words bit_or(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int n>
inline Words shift_right(Words a) {
  return {_mm512_srli_epi32(a.v, n)};
}
template <int n>
inline Words shift_left(Words a) {
  return {_mm512_slli_epi32(a.v, n)};
}
inline Words add_words(Words a, uint32_t b) {
  return {_mm512_add_epi32(a.v, _mm512_set1_epi32(static_cast<int>(b)))};
}
inline Words add_words(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Words bit_xor(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Lanes to_lanes(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Words to_words(Lanes a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Lanes as_lanes(Words a) { return {_mm512_castsi512_ps(a.v)}; }
inline Words as_words(Lanes a) { return {_mm512_castps_si512(a.v)}; }

inline Lanes from_half(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline Lanes from_bfloat16(const void* p) {
  const __m256i a = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16))};
}
// To the nearest, ties to even; a NaN stays one.
inline void store_bfloat16(void* p, Lanes a) {
  const __m512i bits = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan, nan);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline Lanes from_u8(const void* p) {
  return to_lanes({_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))});
}
inline Lanes from_i8(const void* p) {
  return to_lanes({_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))});
}

// Exact integer sums of 8-bit activations times codes less `centre`: one without products, one with those of 4
// activations and 4 unsigned codes a lane added, and one as 32-bit integers. Codes of 8 bits have the centre 128.
// less: of the activations, see SharedBy32.
template <int centre>
inline Words begin_dot4(const int16_t (&less)[2]) {
  if constexpr (centre == 0) return zero_words();
  return {_mm512_set1_epi32(centre * (less[0] + less[1]))};
}
template <int centre>
inline Words dot4(const int8_t* x, Words codes, Words sum) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(sum.v, codes.v, _mm512_set1_epi32(four))};
}
template <int centre>
inline Words end_dot4(Words sum) {
  return sum;
}

// sum + the products of 2 bfloat16 weights a lane with 2 bfloat16 activations.
#ifdef __AVX512BF16__
constexpr bool kHasDot2 = true;
inline Lanes dot2(const uint16_t* x, Words w, Lanes sum) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(two))};
}
#else
constexpr bool kHasDot2 = false;
#endif

}  // namespace noria::NORIA_ISA

#include "simd/transpose_x86.h"
