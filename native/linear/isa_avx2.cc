#define NORIA_ISA avx2
#include "simd/avx2.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_avx2 __attribute__((visibility("default")));
const Kernels kernels_avx2 = {NORIA_KERNELS(avx2)};
}  // namespace noria
