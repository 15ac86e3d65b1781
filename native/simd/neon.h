// Sixteen lanes as four NEON registers (64-bit Arm); uses the dot-product extension where compiled for it.
#pragma once

#include <arm_neon.h>

#include <cstdint>

// Callbacks too must be inlined, or the sums would leave their registers.
#ifndef NORIA_INLINE
#define NORIA_INLINE __attribute__((always_inline))
#endif

namespace noria::NORIA_ISA {

constexpr int kMaxRows = 5;  // 5 rows x 4 registers of sums, 4 of weights: 24 of 32 registers, and the activations
constexpr int kDirectRows = 2;  // up to so many rows codes are expanded in registers
constexpr int kDirectRowsDot4 = 2, kMaxRowsDot4 = 2;  // the same of 8-bit activations
constexpr bool kHasDot2 = false;
constexpr int tiles_together(int) { return 1; }

struct Lanes {
  float32x4_t v[4];
};
struct Words {
  uint32x4_t v[4];
};

#define NORIA_EACH(type, expression)                \
  type r;                                           \
  for (int i = 0; i < 4; ++i) r.v[i] = (expression); \
  return r

inline Lanes splat(float x) { NORIA_EACH(Lanes, vdupq_n_f32(x)); }
inline Lanes zero() { return splat(0.0f); }
inline Lanes load(const float* p) { NORIA_EACH(Lanes, vld1q_f32(p + 4 * i)); }
inline void store(float* p, Lanes a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline Lanes add(Lanes a, Lanes b) { NORIA_EACH(Lanes, vaddq_f32(a.v[i], b.v[i])); }
inline Lanes mul(Lanes a, Lanes b) { NORIA_EACH(Lanes, vmulq_f32(a.v[i], b.v[i])); }
inline Lanes div(Lanes a, Lanes b) { NORIA_EACH(Lanes, vdivq_f32(a.v[i], b.v[i])); }
// NaN when either is.
inline Lanes max(Lanes a, Lanes b) { NORIA_EACH(Lanes, vmaxq_f32(a.v[i], b.v[i])); }
inline Lanes min(Lanes a, Lanes b) { NORIA_EACH(Lanes, vminq_f32(a.v[i], b.v[i])); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { NORIA_EACH(Lanes, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
inline Lanes fma(const float* x, Lanes w, Lanes sum) { NORIA_EACH(Lanes, vfmaq_n_f32(sum.v[i], w.v[i], *x)); }
inline Lanes round_even(Lanes a) { NORIA_EACH(Lanes, vrndnq_f32(a.v[i])); }

inline float max_of(Lanes a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}

inline Words splat_word(uint32_t x) { NORIA_EACH(Words, vdupq_n_u32(x)); }
inline Words zero_words() { return splat_word(0); }
inline Words load_words(const void* p) {
  NORIA_EACH(Words, vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i)));
}
inline void store_words(void* p, Words a) {
  for (int i = 0; i < 4; ++i) vst1q_u8(static_cast<uint8_t*>(p) + 16 * i, vreinterpretq_u8_u32(a.v[i]));
}
// The low byte of each.
inline void store_bytes(void* p, Words a) {
  for (int i = 0; i < 4; i += 2) {
    const uint16x8_t eight = vcombine_u16(vmovn_u32(a.v[i]), vmovn_u32(a.v[i + 1]));
    vst1_u8(static_cast<uint8_t*>(p) + 4 * i, vmovn_u16(eight));
  }
}
inline Words bit_and(Words a, uint32_t mask) { NORIA_EACH(Words, vandq_u32(a.v[i], vdupq_n_u32(mask))); }
inline Words bit_or(Words a, Words b) { NORIA_EACH(Words, vorrq_u32(a.v[i], b.v[i])); }
template <int n>
inline Words shift_right(Words a) {
  if constexpr (n == 0) return a;
  NORIA_EACH(Words, vshrq_n_u32(a.v[i], n ? n : 1));
}
template <int n>
inline Words shift_left(Words a) {
  NORIA_EACH(Words, vshlq_n_u32(a.v[i], n));
}
inline Words add_words(Words a, uint32_t b) { NORIA_EACH(Words, vaddq_u32(a.v[i], vdupq_n_u32(b))); }
inline Words add_words(Words a, Words b) { NORIA_EACH(Words, vaddq_u32(a.v[i], b.v[i])); }
inline Words bit_xor(Words a, Words b) { NORIA_EACH(Words, veorq_u32(a.v[i], b.v[i])); }
inline Lanes to_lanes(Words a) { NORIA_EACH(Lanes, vcvtq_f32_s32(vreinterpretq_s32_u32(a.v[i]))); }
inline Words to_words(Lanes a) { NORIA_EACH(Words, vreinterpretq_u32_s32(vcvtnq_s32_f32(a.v[i]))); }
inline Lanes as_lanes(Words a) { NORIA_EACH(Lanes, vreinterpretq_f32_u32(a.v[i])); }
inline Words as_words(Lanes a) { NORIA_EACH(Words, vreinterpretq_u32_f32(a.v[i])); }

inline Lanes from_half(const void* p) {
  NORIA_EACH(Lanes, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t*>(p) + 8 * i))));
}
inline Lanes from_bfloat16(const void* p) {
  NORIA_EACH(Lanes, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(static_cast<const uint16_t*>(p) + 4 * i), 16)));
}
// To the nearest, ties to even; a NaN stays one.
inline void store_bfloat16(void* p, Lanes a) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]), high = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t nan = vorrq_u32(high, vdupq_n_u32(0x40));
    const uint32x4_t is_number = vceqq_f32(a.v[i], a.v[i]);
    vst1_u16(static_cast<uint16_t*>(p) + 4 * i, vmovn_u32(vbslq_u32(is_number, vshrq_n_u32(up, 16), nan)));
  }
}
inline Lanes from_u8(const void* p) {
  const uint8x16_t a = vld1q_u8(static_cast<const uint8_t*>(p));
  const uint16x8_t low = vmovl_u8(vget_low_u8(a)), high = vmovl_u8(vget_high_u8(a));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline Lanes from_i8(const void* p) {
  const int8x16_t a = vld1q_s8(static_cast<const int8_t*>(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(a)), high = vmovl_s8(vget_high_s8(a));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}

// to[i][j] = rows[j][from + i], i and j below 16.
inline void transpose(const float* const (&rows)[16], int64_t from, float* to) {
  for (int j = 0; j < 16; j += 4) {
    for (int i = 0; i < 16; i += 4) {
      const float* const* row = rows + j;
      const int64_t at = from + i;
      float square[16];  // stored interleaved: element i of row j goes to 4 i + j
      vst4q_f32(square, {{vld1q_f32(row[0] + at), vld1q_f32(row[1] + at), vld1q_f32(row[2] + at), vld1q_f32(row[3] + at)}});
      for (int k = 0; k < 4; ++k) vst1q_f32(to + 16 * (i + k) + j, vld1q_f32(square + 4 * k));
    }
  }
}

// Exact integer sums of 8-bit activations times codes less `centre`: one without products, one with those of 4
// activations and 4 unsigned codes a lane added, and one as 32-bit integers. Codes of 8 bits have the centre 128.
// less: of the activations, see SharedBy32.
template <int centre>
inline Words begin_dot4(const int16_t (&less)[2]) {
#ifdef __ARM_FEATURE_DOTPROD
  if constexpr (centre == 128) return zero_words();  // dot4 subtracts it
#endif
  return splat_word(static_cast<uint32_t>(centre * (less[0] + less[1])));
}
template <int centre>
inline Words dot4(const int8_t* x, Words codes, Words sum) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int i = 0; i < 4; ++i) {
    int32x4_t s = vreinterpretq_s32_u32(sum.v[i]);
    uint8x16_t c = vreinterpretq_u8_u32(codes.v[i]);
#ifdef __ARM_FEATURE_DOTPROD
    if constexpr (centre == 128) c = veorq_u8(c, vdupq_n_u8(128));  // codes above 127 are no signed bytes
    s = vdotq_s32(s, vreinterpretq_s8_u8(c), a);
#else
    const int16x8_t c0 = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(c)));
    const int16x8_t c1 = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(c)));
    const int16x8_t a0 = vmovl_s8(vget_low_s8(a));
    const auto products = [&](int16x8_t v) {
      const int32x4_t low = vmull_s16(vget_low_s16(v), vget_low_s16(a0));
      return vpaddq_s32(low, vmull_s16(vget_high_s16(v), vget_high_s16(a0)));
    };
    s = vaddq_s32(s, vpaddq_s32(products(c0), products(c1)));
#endif
    sum.v[i] = vreinterpretq_u32_s32(s);
  }
  return sum;
}
template <int centre>
inline Words end_dot4(Words sum) {
  return sum;
}

#undef NORIA_EACH

}  // namespace noria::NORIA_ISA
