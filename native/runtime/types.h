// What all native ops share: the width of the lanes, and the types of activations.
#pragma once

#include <cstdint>

namespace noria {

constexpr int kLanes = 16;

enum class Dtype : int32_t { kFloat32, kBFloat16 };

// static, like all that is not in a namespace of its instruction set: the linker must not pick the copy of a file that
// was compiled for another processor.
static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace noria
