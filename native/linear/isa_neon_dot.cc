#define NORIA_ISA neon_dot
#include "simd/neon.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_neon_dot __attribute__((visibility("default")));
const Kernels kernels_neon_dot = {NORIA_KERNELS(neon_dot)};
}  // namespace noria
