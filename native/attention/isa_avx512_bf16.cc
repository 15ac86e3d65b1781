#define NORIA_ISA avx512_bf16
#include "simd/avx512.h"

#include "attention/kernels.h"

namespace noria {
extern const attention::Kernels attention_avx512_bf16 __attribute__((visibility("default")));
const attention::Kernels attention_avx512_bf16 = {avx512_bf16::write, avx512_bf16::attend, avx512_bf16::combine};
}  // namespace noria
