#define NORIA_ISA neon
#include "simd/neon.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_neon __attribute__((visibility("default")));
const Kernels kernels_neon = {NORIA_KERNELS(neon)};
}  // namespace noria
