#define NORIA_ISA avx512_bf16
#include "simd/avx512.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_avx512_bf16 __attribute__((visibility("default")));
const Kernels kernels_avx512_bf16 = {NORIA_KERNELS(avx512_bf16)};
}  // namespace noria
