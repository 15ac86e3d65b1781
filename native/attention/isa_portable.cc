#define NORIA_ISA portable
#include "simd/portable.h"

#include "attention/kernels.h"

namespace noria {
extern const attention::Kernels attention_portable __attribute__((visibility("default")));
const attention::Kernels attention_portable = {portable::write, portable::attend, portable::combine};
}  // namespace noria
