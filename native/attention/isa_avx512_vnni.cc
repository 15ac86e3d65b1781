#define NORIA_ISA avx512_vnni
#include "simd/avx512.h"

#include "attention/kernels.h"

namespace noria {
extern const attention::Kernels attention_avx512_vnni __attribute__((visibility("default")));
const attention::Kernels attention_avx512_vnni = {avx512_vnni::write, avx512_vnni::attend, avx512_vnni::combine};
}  // namespace noria
