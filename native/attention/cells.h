// Numbers of the cache to floats and back.
#pragma once

#include <type_traits>

#include "attention/types.h"

namespace noria::NORIA_ISA {

using attention::CacheDtype;
using attention::Problem;

// Calls f with the dtype as a constant.
template <typename F>
inline void with_cells(CacheDtype dtype, F&& f) {
  switch (dtype) {
    case CacheDtype::kFloat32: return f(std::integral_constant<CacheDtype, CacheDtype::kFloat32>{});
    case CacheDtype::kBFloat16: return f(std::integral_constant<CacheDtype, CacheDtype::kBFloat16>{});
    case CacheDtype::kFloat16: return f(std::integral_constant<CacheDtype, CacheDtype::kFloat16>{});
    case CacheDtype::kE4M3: return f(std::integral_constant<CacheDtype, CacheDtype::kE4M3>{});
    case CacheDtype::kE5M2: return f(std::integral_constant<CacheDtype, CacheDtype::kE5M2>{});
    case CacheDtype::kInt8: return f(std::integral_constant<CacheDtype, CacheDtype::kInt8>{});
  }
}

// 16 cells. Halves keep subnormal numbers where the processor treats subnormal floats as zero, so the 8-bit floats,
// which are halves with bits left out, go through them.
template <CacheDtype dtype>
inline NORIA_INLINE Lanes widen_cells(const uint8_t* p) {
  if constexpr (dtype == CacheDtype::kFloat32) {
    return load(reinterpret_cast<const float*>(p));
  } else if constexpr (dtype == CacheDtype::kBFloat16) {
    return from_bfloat16(p);
  } else if constexpr (dtype == CacheDtype::kFloat16) {
    return from_half(p);
  } else if constexpr (dtype == CacheDtype::kInt8) {
    return from_i8(p);
  } else {
    uint16_t half[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (dtype == CacheDtype::kE5M2) {
        half[i] = static_cast<uint16_t>(p[i] << 8);
      } else {
        const int size = p[i] & 0x7f;
        half[i] = static_cast<uint16_t>((p[i] & 0x80) << 8 | (size == 0x7f ? 0x7e00 : size << 7));
      }
    }
    const Lanes value = from_half(half);
    return dtype == CacheDtype::kE5M2 ? value : mul(value, splat(256.0f));  // the bias of e4m3 is 7, not 15
  }
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// To the nearest float of so many bits, ties to even; too large for them: infinity. For NaNs: the code `nan`.
template <int exponent_bits, int mantissa_bits, uint32_t nan>
inline uint32_t round_to(float value) {
  constexpr uint32_t bias = (1 << (exponent_bits - 1)) - 1, shift = 23 - mantissa_bits;
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
  const uint32_t sign = bits >> 31 << (exponent_bits + mantissa_bits);
  if (size > 0x7f800000) return sign | nan;
  if (size < (128 - bias) << 23) {  // subnormal: adding a number whose last place is the smallest of them rounds to it
    const uint32_t anchor = (127 + 24 - bias - mantissa_bits) << 23;
    return sign | (bits_of(float_of(size) + float_of(anchor)) - anchor);
  }
  const uint32_t rounded = size + ((1u << (shift - 1)) - 1) + (size >> shift & 1);
  const uint32_t code = (rounded >> shift) - ((127 - bias) << mantissa_bits);
  constexpr uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  return sign | (exponent_bits == 4 || code < infinity ? code : infinity);  // e4m3 has none, and is clipped
}

inline float clip(float value, float limit) { return value > limit ? limit : value < -limit ? -limit : value; }

// One number as XLA would convert it after `_saturate` of cache.py, which clips what comes from a wider type.
template <CacheDtype dtype, bool from_bfloat16>
inline void narrow_cell(float value, uint8_t* p) {
  if constexpr (dtype == CacheDtype::kFloat32) {
    __builtin_memcpy(p, &value, 4);
  } else if constexpr (dtype == CacheDtype::kBFloat16 || dtype == CacheDtype::kFloat16) {
    uint16_t code;
    if constexpr (dtype == CacheDtype::kBFloat16) {
      if constexpr (!from_bfloat16) {
        value = clip(value, float_of(0x7f7f0000));
        // XLA's clip takes subnormal floats as zeros of their sign.
        if ((bits_of(value) & 0x7fffffff) < 0x00800000) value = float_of(bits_of(value) & 0x80000000);
      }
      code = static_cast<uint16_t>(round_to<8, 7, 0x7fc0>(value));
    } else {
      code = static_cast<uint16_t>(round_to<5, 10, 0x7e00>(from_bfloat16 ? value : clip(value, 65504.0f)));
    }
    __builtin_memcpy(p, &code, 2);
  } else if constexpr (dtype == CacheDtype::kE5M2) {
    *p = static_cast<uint8_t>(round_to<5, 2, 0x7e>(clip(value, 57344.0f)));
  } else {
    *p = static_cast<uint8_t>(round_to<4, 3, 0x7f>(clip(value, 448.0f)));
  }
}

// What is no number becomes 0, as in XLA.
inline int8_t round_to_int8(float level) {
  if (level != level) return 0;
  // The last bits of 1.5 * 2^23 + level are level rounded to an integer, ties to even.
  return static_cast<int8_t>(static_cast<int32_t>(bits_of(clip(level, 127.0f) + 12582912.0f) - 0x4b400000));
}

}  // namespace noria::NORIA_ISA
