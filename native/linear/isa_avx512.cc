#define NORIA_ISA avx512
#include "simd/avx512.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_avx512 __attribute__((visibility("default")));
const Kernels kernels_avx512 = {"avx512", avx512::run, avx512::units, avx512::quantize, avx512::widen, avx512::narrow, avx512::row};
}  // namespace noria
