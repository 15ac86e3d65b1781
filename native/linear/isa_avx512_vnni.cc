#define NORIA_ISA avx512_vnni
#include "simd/avx512.h"

#include "linear/kernels.h"

namespace noria {
extern const Kernels kernels_avx512_vnni __attribute__((visibility("default")));
const Kernels kernels_avx512_vnni = {NORIA_KERNELS(avx512_vnni)};
}  // namespace noria
