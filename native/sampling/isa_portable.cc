#define NORIA_ISA portable
#include "simd/portable.h"

#include "sampling/kernels.h"

namespace noria {
extern const sampling::Kernels sampling_portable __attribute__((visibility("default")));
const sampling::Kernels sampling_portable = {portable::choose, portable::score};
}  // namespace noria
