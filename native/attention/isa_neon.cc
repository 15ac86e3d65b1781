#define NORIA_ISA neon
#include "simd/neon.h"

#include "attention/kernels.h"

namespace noria {
extern const attention::Kernels attention_neon __attribute__((visibility("default")));
const attention::Kernels attention_neon = {neon::write, neon::attend, neon::combine};
}  // namespace noria
