#include "runtime/cpu.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace noria {

// Defined in isa_<name>.cc; null where that was not compiled, for another processor or by an old compiler.
#define NORIA_PATH(name, attributes)                            \
  extern const Kernels kernels_##name attributes;               \
  extern const attention::Kernels attention_##name attributes;  \
  extern const sampling::Kernels sampling_##name attributes
#define NORIA_OPTIONAL __attribute__((weak, visibility("default")))
NORIA_PATH(portable, );
NORIA_PATH(avx2, NORIA_OPTIONAL);
NORIA_PATH(avx512_vnni, NORIA_OPTIONAL);
NORIA_PATH(avx512_bf16, NORIA_OPTIONAL);
NORIA_PATH(neon, NORIA_OPTIONAL);
NORIA_PATH(neon_dot, NORIA_OPTIONAL);

int available_paths(Path (&paths)[kMaxPaths]) {
  int count = 0;
  const auto add = [&](const char* name, const Kernels* linear, const attention::Kernels* attention,
                       const sampling::Kernels* sampling) {
    if (linear && attention && sampling) paths[count++] = {name, linear, attention, sampling};
  };
#define NORIA_ADD(name) add(#name, &kernels_##name, &attention_##name, &sampling_##name)
  NORIA_ADD(portable);
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {  // all of these have F16C
    NORIA_ADD(avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
      NORIA_ADD(avx512_vnni);
      if (__builtin_cpu_supports("avx512bf16")) NORIA_ADD(avx512_bf16);
    }
  }
#elif defined(__aarch64__)
  NORIA_ADD(neon);
#if defined(__APPLE__)
  NORIA_ADD(neon_dot);
#elif defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) NORIA_ADD(neon_dot);
#endif
#endif
  return count;
}

bool find_path(const char* name, size_t length, Path* path) {
  Path paths[kMaxPaths];
  const int count = available_paths(paths);
  for (int i = 0; i < count; ++i) {
    const bool named = std::strlen(paths[i].name) == length && std::memcmp(paths[i].name, name, length) == 0;
    if (!named && !(length == 0 && i == count - 1)) continue;
    *path = paths[i];
    return true;
  }
  return false;
}

}  // namespace noria
