#define NORIA_ISA avx2
#include "simd/avx2.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_avx2 __attribute__((visibility("default")));
const Kernels kernels_avx2 = {avx2::run, avx2::units, avx2::quantize, avx2::widen, avx2::narrow, avx2::row};
}  // namespace noria
