// What the handlers of XLA's custom calls have in common: errors, checks, and reading of operands.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

#include "linear/types.h"
#include "runtime/cpu.h"
#include "runtime/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace noria {

struct Invalid {
  std::string message;
};
inline void require(bool good, const char* message) {
  if (!good) throw Invalid{message};
}

// Runs the body of a handler; what it throws becomes the call's error.
template <typename Body>
ffi::Error guarded(const Body& body) {
  try {
    body();
  } catch (const Invalid& invalid) {
    return ffi::Error::InvalidArgument("noria: " + invalid.message);
  } catch (const std::bad_alloc&) {
    return ffi::Error::Internal("noria: out of memory");
  }
  return ffi::Error::Success();
}

inline Dtype dtype_of(ffi::AnyBuffer buffer) {
  const ffi::DataType type = buffer.element_type();
  require(type == ffi::DataType::F32 || type == ffi::DataType::BF16, "floats must be float32 or bfloat16");
  return type == ffi::DataType::F32 ? Dtype::kFloat32 : Dtype::kBFloat16;
}
inline int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// The path of that name; "" is the best.
inline Path path_of(std::string_view name) {
  Path path;
  if (!find_path(name.data(), name.size(), &path)) throw Invalid{"this processor has no path " + std::string(name)};
  return path;
}
inline const Kernels& kernels_of(std::string_view path) { return *path_of(path).linear; }

// Two int32: the layer, and how many rows count.
struct Place {
  int64_t layer, rows;
  Place(ffi::AnyBuffer place, int64_t all_rows) {
    require(place.element_type() == ffi::DataType::S32 && place.element_count() == 2,
            "the layer and the number of rows must be two int32");
    const auto* values = static_cast<const int32_t*>(place.untyped_data());
    layer = values[0];
    rows = std::clamp<int64_t>(values[1], 0, all_rows);
  }
};

// The operands behind the first two, in order. Those that hold a value for every layer are read at one layer.
class Operands {
 public:
  Operands(ffi::RemainingArgs args, int64_t layer) : args_(args), layer_(layer) {}

  ffi::AnyBuffer next() {
    auto buffer = args_.get<ffi::AnyBuffer>(at_++);
    if (buffer.has_error()) throw Invalid{"an operand is missing"};
    return *buffer;
  }

  // [layers, count] at the layer.
  const void* vector(int64_t count, Dtype* dtype) {
    const ffi::AnyBuffer buffer = next();
    *dtype = dtype_of(buffer);
    const auto size = static_cast<int64_t>(buffer.element_count());
    require(size % count == 0 && (layer_ + 1) * count <= size, "a vector must be [layers, size]");
    return static_cast<const uint8_t*>(buffer.untyped_data()) + layer_ * count * size_of(*dtype);
  }

  // A norm's weight, as float32 with the offset added.
  template <int slot>
  Norm norm(int64_t count, float epsilon, float offset, const Kernels& kernels) {
    Dtype dtype;
    const void* weight = vector(count, &dtype);
    float* scale = scratch<float, slot>(count);
    if (dtype == Dtype::kBFloat16)
      kernels.widen(static_cast<const uint16_t*>(weight), count, scale);
    else
      std::memcpy(scale, weight, count * sizeof(float));
    for (int64_t i = 0; i < count; ++i) scale[i] += offset;
    return {scale, epsilon};
  }

 private:
  ffi::RemainingArgs args_;
  int64_t layer_;
  size_t at_ = 0;
};

inline int64_t pool_threads(const ffi::ThreadPool& pool, int64_t threads) { return threads ? threads : pool.num_threads(); }

}  // namespace noria
