// Which instruction sets were compiled in, and which this processor has.
#pragma once

#include "linear/types.h"

namespace noria {

constexpr int kMaxPaths = 8;

// Paths this processor can run, slowest first; `portable` is always the first. Returns their number.
int available_kernels(const Kernels* (&paths)[kMaxPaths]);

// The path of that name, the fastest one for an empty name, or null.
const Kernels* find_kernels(const char* name, size_t length);

}  // namespace noria
