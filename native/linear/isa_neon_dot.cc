#define NORIA_ISA neon_dot
#include "simd/neon.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_neon_dot __attribute__((visibility("default")));
const Kernels kernels_neon_dot = {neon_dot::run, neon_dot::units, neon_dot::quantize, neon_dot::widen, neon_dot::narrow, neon_dot::row};
}  // namespace noria
