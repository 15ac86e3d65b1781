#define NORIA_ISA neon
#include "simd/neon.h"

#include "sampling/kernels.h"

namespace noria {
extern const sampling::Kernels sampling_neon __attribute__((visibility("default")));
const sampling::Kernels sampling_neon = {neon::choose, neon::score};
}  // namespace noria
