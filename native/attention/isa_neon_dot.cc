#define NORIA_ISA neon_dot
#include "simd/neon.h"

#include "attention/kernels.h"

namespace noria {
extern const attention::Kernels attention_neon_dot __attribute__((visibility("default")));
const attention::Kernels attention_neon_dot = {neon_dot::write, neon_dot::attend, neon_dot::combine};
}  // namespace noria
