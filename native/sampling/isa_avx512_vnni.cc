#define NORIA_ISA avx512_vnni
#include "simd/avx512.h"

#include "sampling/kernels.h"

namespace noria {
extern const sampling::Kernels sampling_avx512_vnni __attribute__((visibility("default")));
const sampling::Kernels sampling_avx512_vnni = {avx512_vnni::choose, avx512_vnni::score};
}  // namespace noria
