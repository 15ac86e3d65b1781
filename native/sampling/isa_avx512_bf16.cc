#define NORIA_ISA avx512_bf16
#include "simd/avx512.h"

#include "sampling/kernels.h"

namespace noria {
extern const sampling::Kernels sampling_avx512_bf16 __attribute__((visibility("default")));
const sampling::Kernels sampling_avx512_bf16 = {avx512_bf16::choose, avx512_bf16::score};
}  // namespace noria
