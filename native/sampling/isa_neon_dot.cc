#define NORIA_ISA neon_dot
#include "simd/neon.h"

#include "sampling/kernels.h"

namespace noria {
extern const sampling::Kernels sampling_neon_dot __attribute__((visibility("default")));
const sampling::Kernels sampling_neon_dot = {neon_dot::choose, neon_dot::score};
}  // namespace noria
