// A square of 16 rows of 16 words turned on its side, as four squares of 8: as quick with AVX-512 as its own shuffles.
#pragma once

#include <immintrin.h>

#include "simd/loops.h"

namespace noria::NORIA_ISA {

template <int first>
inline NORIA_INLINE void transpose_8x8(const float* const* rows, int64_t from, float* to) {
  __m256 a[8], b[8];
  unroll<8>([&](auto i) NORIA_INLINE { a[i] = _mm256_loadu_ps(rows[first + i] + from); });
  unroll<4>([&](auto i) NORIA_INLINE {
    b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  });
  unroll<2>([&](auto half) NORIA_INLINE {
    constexpr int i = 4 * half;
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  });
  unroll<4>([&](auto i) NORIA_INLINE {
    _mm256_storeu_ps(to + 16 * i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + 16 * (i + 4), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  });
}

// to[i][j] = rows[j][from + i], i and j below 16.
inline void transpose(const float* const (&rows)[16], int64_t from, float* to) {
  transpose_8x8<0>(rows, from, to);
  transpose_8x8<8>(rows, from, to + 8);
  transpose_8x8<0>(rows, from + 8, to + 128);
  transpose_8x8<8>(rows, from + 8, to + 136);
}

}  // namespace noria::NORIA_ISA
