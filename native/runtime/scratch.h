// Memory that outlives a call. Not for kernels: see runtime/types.h on code that instruction sets would share.
#pragma once

#include <cstdint>
#include <memory>

namespace noria {

// Memory that a thread keeps between calls: a large fresh allocation would be paged in each time.
template <typename T, int slot>
T* scratch(int64_t count) {
  thread_local std::unique_ptr<T[]> memory;
  thread_local int64_t size = 0;
  if (size < count) {
    memory.reset(new T[count]);
    size = count;
  }
  return memory.get();
}

}  // namespace noria
