// Which instruction sets were compiled in, and which this processor has.
#pragma once

#include "attention/types.h"
#include "linear/types.h"
#include "sampling/types.h"

namespace noria {

constexpr int kMaxPaths = 8;

// The kernels of all ops for one instruction set.
struct Path {
  const char* name;
  const Kernels* linear;
  const attention::Kernels* attention;
  const sampling::Kernels* sampling;
};

// Paths this processor can run, slowest first; `portable` is always the first. Returns their number.
int available_paths(Path (&paths)[kMaxPaths]);

// The path of that name, or the fastest one for an empty name. False if there is none.
bool find_path(const char* name, size_t length, Path* path);

}  // namespace noria
