#include "runtime/cpu.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace noria {

// Each is defined in isa_<name>.cc; null where that was not compiled, for another processor or by an old compiler.
#define NORIA_OPTIONAL extern const Kernels __attribute__((weak, visibility("default")))
extern const Kernels kernels_portable;
NORIA_OPTIONAL kernels_avx2;
NORIA_OPTIONAL kernels_avx512_vnni;
NORIA_OPTIONAL kernels_avx512_bf16;
NORIA_OPTIONAL kernels_neon;
NORIA_OPTIONAL kernels_neon_dot;

int available_kernels(const Kernels* (&paths)[kMaxPaths]) {
  int count = 0;
  paths[count++] = &kernels_portable;
  const auto add = [&](const Kernels* path) {
    if (path != nullptr) paths[count++] = path;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {  // all of these have F16C
    add(&kernels_avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
      add(&kernels_avx512_vnni);
      if (__builtin_cpu_supports("avx512bf16")) add(&kernels_avx512_bf16);
    }
  }
#elif defined(__aarch64__)
  add(&kernels_neon);
#if defined(__APPLE__)
  add(&kernels_neon_dot);
#elif defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) add(&kernels_neon_dot);
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
