// What Python asks the library with ctypes.
#include "runtime/cpu.h"

#pragma GCC visibility push(default)
extern "C" {

// Name of the i-th path that this processor can run, slowest first; null beyond the last.
const char* noria_path(int32_t index) {
  noria::Path paths[noria::kMaxPaths];
  const int count = noria::available_paths(paths);
  return index >= 0 && index < count ? paths[index].name : nullptr;
}

}  // extern "C"
#pragma GCC visibility pop
