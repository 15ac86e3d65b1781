#define NORIA_ISA avx512_bf16
#include "simd/avx512.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_avx512_bf16 __attribute__((visibility("default")));
const Kernels kernels_avx512_bf16 = {avx512_bf16::run, avx512_bf16::units, avx512_bf16::quantize, avx512_bf16::widen, avx512_bf16::narrow, avx512_bf16::row};
}  // namespace noria
