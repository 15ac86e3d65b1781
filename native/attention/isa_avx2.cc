#define NORIA_ISA avx2
#include "simd/avx2.h"

#include "attention/kernels.h"

namespace noria {
extern const attention::Kernels attention_avx2 __attribute__((visibility("default")));
const attention::Kernels attention_avx2 = {avx2::write, avx2::attend, avx2::combine};
}  // namespace noria
