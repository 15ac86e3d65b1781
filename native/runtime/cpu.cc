#include "runtime/cpu.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace noria {

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_avx512_vnni, kernels_avx512_bf16,
    kernels_neon, kernels_neon_dot;

int available_kernels(const Kernels* (&paths)[kMaxPaths]) {
  int count = 0;
  paths[count++] = &kernels_portable;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {  // all of these have F16C
    paths[count++] = &kernels_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      paths[count++] = &kernels_avx512;
      if (__builtin_cpu_supports("avx512vnni")) {
        paths[count++] = &kernels_avx512_vnni;
        if (__builtin_cpu_supports("avx512bf16")) paths[count++] = &kernels_avx512_bf16;
      }
    }
  }
#elif defined(__aarch64__)
  paths[count++] = &kernels_neon;
#if defined(__APPLE__)
  paths[count++] = &kernels_neon_dot;
#elif defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) paths[count++] = &kernels_neon_dot;
#endif
#endif
  return count;
}

const Kernels* find_kernels(const char* name, size_t length) {
  const Kernels* paths[kMaxPaths];
  const int count = available_kernels(paths);
  if (length == 0) return paths[count - 1];
  for (int i = 0; i < count; ++i)
    if (std::strlen(paths[i]->name) == length && std::memcmp(paths[i]->name, name, length) == 0) return paths[i];
  return nullptr;
}

}  // namespace noria
