#define NORIA_ISA avx512_vnni
#include "simd/avx512.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_avx512_vnni __attribute__((visibility("default")));
const Kernels kernels_avx512_vnni = {avx512_vnni::run, avx512_vnni::units, avx512_vnni::quantize, avx512_vnni::widen, avx512_vnni::narrow, avx512_vnni::row};
}  // namespace noria
