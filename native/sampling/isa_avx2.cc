#define NORIA_ISA avx2
#include "simd/avx2.h"

#include "sampling/kernels.h"

namespace noria {
extern const sampling::Kernels sampling_avx2 __attribute__((visibility("default")));
const sampling::Kernels sampling_avx2 = {avx2::choose, avx2::score};
}  // namespace noria
