// The XLA custom call noria_rotary: the heads of each token normalized and turned.
#include "linear/compute.h"
#include "runtime/operands.h"

namespace noria {
namespace {

struct Heads {
  const uint8_t* from;
  uint8_t* to;
  Dtype dtype;
  int64_t count, size;  // heads of a token, elements of a head
  Norm norm;
  int64_t bytes() const { return count * size * size_of(dtype); }  // of a token

  Heads(ffi::AnyBuffer x, ffi::AnyBuffer y) : norm{} {
    require(x.dimensions().size() == 3 && x.dimensions()[2] % 2 == 0, "heads must be [tokens, heads, even size]");
    dtype = dtype_of(x);
    require(dtype_of(y) == dtype && y.size_bytes() == x.size_bytes(), "results must be like the operands");
    from = static_cast<const uint8_t*>(x.untyped_data());
    to = static_cast<uint8_t*>(y.untyped_data());
    count = x.dimensions()[1];
    size = x.dimensions()[2];
  }

  void rotate(const Kernels& kernels, int64_t token, const float* cosine, const float* sine) const {
    float* work = scratch<float, 7>(size);
    const int64_t head_bytes = size * size_of(dtype), start = token * bytes();
    for (int64_t at = start; at < start + bytes(); at += head_bytes)
      kernels.rotate(from + at, dtype, size, norm, cosine, sine, work, to + at);
  }
};

ffi::Error rotary(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer cosine, ffi::AnyBuffer sine,
                  ffi::AnyBuffer where, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> rotated_q,
                  ffi::Result<ffi::AnyBuffer> rotated_k, ffi::Span<const int64_t> normed,
                  ffi::Span<const float> epsilons, ffi::Span<const float> offsets, std::string_view path,
                  int64_t threads) {
  return guarded([&] {
    const Kernels& kernels = kernels_of(path);
    Heads heads[2] = {{q, *rotated_q}, {k, *rotated_k}};
    const int64_t tokens = q.dimensions()[0], half = heads[0].size / 2;
    require(k.dimensions()[0] == tokens && heads[1].size == heads[0].size, "queries and keys must be of one size");
    require(cosine.element_type() == ffi::DataType::F32 && sine.element_type() == ffi::DataType::F32 &&
                cosine.element_count() == sine.element_count(),
            "cosines and sines must be float32 of one shape");
    require(where.element_type() == ffi::DataType::S32 && where.element_count() == 3,
            "the layer, the number of rows and the rope must be three int32");
    const auto* place = static_cast<const int32_t*>(where.untyped_data());
    const int64_t rows = std::clamp<int64_t>(place[1], 0, tokens), table = tokens * half;
    require(place[2] >= 0 && (place[2] + 1) * table <= static_cast<int64_t>(cosine.element_count()),
            "this rope does not exist");
    Operands operands(args, place[0]);
    if (normed[0]) heads[0].norm = operands.norm<4>(heads[0].size, epsilons[0], offsets[0], kernels);
    if (normed[1]) heads[1].norm = operands.norm<5>(heads[1].size, epsilons[1], offsets[1], kernels);
    const float* cosines = static_cast<const float*>(cosine.untyped_data()) + place[2] * table;
    const float* sines = static_cast<const float*>(sine.untyped_data()) + place[2] * table;
    const int64_t width = (heads[0].count + heads[1].count) * heads[0].size;
    each_row(pool, rows, width, pool_threads(pool, threads), [&](int64_t token) {
      for (const Heads& each : heads) each.rotate(kernels, token, cosines + token * half, sines + token * half);
    });
    for (const Heads& each : heads) std::memset(each.to + rows * each.bytes(), 0, (tokens - rows) * each.bytes());
  });
}

}  // namespace
}  // namespace noria

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_rotary, noria::rotary,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<ffi::Span<const int64_t>>("normed")
                                  .Attr<ffi::Span<const float>>("epsilons")
                                  .Attr<ffi::Span<const float>>("offsets")
                                  .Attr<std::string_view>("path")
                                  .Attr<int64_t>("threads"));
#pragma GCC visibility pop
