#define NORIA_ISA portable
#include "simd/portable.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_portable __attribute__((visibility("default")));
const Kernels kernels_portable = {NORIA_KERNELS(portable)};
}  // namespace noria
