// Memory that a thread keeps between calls: a large fresh allocation would be paged in each time.
#pragma once

#include <cstdint>
#include <memory>

namespace noria {

// At least `count` elements, valid until the thread asks for the same T and slot again.
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
