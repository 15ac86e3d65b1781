// A square of 16 rows of 16 floats turned on its side, as four squares of 8: as quick with AVX-512 as its own shuffles.
#pragma once

#include <immintrin.h>

namespace noria::NORIA_ISA {

inline void transpose_8x8(const float* from, float* to) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + 16 * i);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + 16 * i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + 16 * (i + 4), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// [16][16] to [16][16]
inline void transpose(const float* from, float* to) {
  for (int row = 0; row < 16; row += 8)
    for (int column = 0; column < 16; column += 8) transpose_8x8(from + 16 * row + column, to + 16 * column + row);
}

}  // namespace noria::NORIA_ISA
