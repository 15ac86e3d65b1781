// The XLA custom calls noria_linear and noria_embed: operands checked, activations prepared, units shared among threads.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "linear/prepare.h"
#include "linear/types.h"
#include "runtime/cpu.h"
#include "runtime/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace noria {
namespace {

constexpr int64_t kSmallWork = 1 << 17;  // multiply-adds below which waking a thread costs more than it gains

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("noria: " + message); }

bool dtype_of(ffi::DataType type, Dtype* out) {
  if (type != ffi::DataType::F32 && type != ffi::DataType::BF16) return false;
  *out = type == ffi::DataType::F32 ? Dtype::kFloat32 : Dtype::kBFloat16;
  return true;
}

struct Layers {
  ffi::Span<const int64_t> kinds, offsets, outputs;  // [weights * layers] twice, [weights]
  int64_t count;
};

// What `weight` of layer `layer` is, checked against the operand that holds it.
ffi::Error find_weight(const Layers& layers, int index, int64_t layer, int64_t k, const ffi::AnyBuffer& data,
                       Weight* weight) {
  const int64_t kind = layers.kinds[index * layers.count + layer], offset = layers.offsets[index * layers.count + layer];
  if (kind < 0 || kind >= kKinds) return invalid("unknown kind of weight");
  weight->kind = static_cast<Kind>(kind);
  weight->outputs = layers.outputs[index];
  const int64_t need = ceil_div(weight->outputs, kLanes) * tile_bytes(weight->kind, k);
  if (data.element_type() != ffi::DataType::U8 || offset < 0 ||
      offset + need > static_cast<int64_t>(data.size_bytes()))
    return invalid("packed weight is smaller than its description says");
  weight->data = static_cast<const uint8_t*>(data.untyped_data()) + offset;
  return ffi::Error::Success();
}

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer place, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> offsets,
                  ffi::Span<const int64_t> outputs, ffi::Span<const int64_t> biased, int64_t activation, bool x8,
                  std::string_view path, int64_t threads) {
  Path found;
  if (!find_path(path.data(), path.size(), &found)) return invalid("this processor has no path " + std::string(path));
  const Kernels* kernels = found.linear;
  Problem p{};
  Dtype x_dtype;
  p.weights = static_cast<int>(outputs.size());
  p.activation = static_cast<Activation>(activation);
  const bool gated = p.activation != Activation::kNone;
  if (p.weights < 1 || p.weights > kMaxWeights || biased.size() != outputs.size() ||
      kinds.size() != offsets.size() || kinds.size() % p.weights != 0)
    return invalid("attributes of the weights do not match");
  if (x.dimensions().size() != 2 || !dtype_of(x.element_type(), &x_dtype))
    return invalid("x must be a matrix of float32 or bfloat16");
  if (place.element_type() != ffi::DataType::S32 || place.element_count() != 2)
    return invalid("the layer and the number of rows must be two int32");
  if (gated && (p.weights != 2 || outputs[0] != outputs[1])) return invalid("a gate needs two weights of one shape");
  if (rets.size() != static_cast<size_t>(gated ? 1 : p.weights)) return invalid("wrong number of results");
  const int64_t all_rows = x.dimensions()[0];
  const int32_t* const where = static_cast<const int32_t*>(place.untyped_data());
  p.rows = std::clamp<int64_t>(where[1], 0, all_rows);
  p.k = x.dimensions()[1];
  const Layers layers{kinds, offsets, outputs, static_cast<int64_t>(kinds.size()) / p.weights};
  const int64_t index = where[0];
  if (index < 0 || index >= layers.count) return invalid("layer " + std::to_string(index) + " does not exist");
  size_t operand = 0;
  int64_t work = 0;
  for (int i = 0; i < p.weights; ++i) {
    auto data = args.get<ffi::AnyBuffer>(operand++);
    if (data.has_error()) return data.error();
    Weight& weight = p.weight[i];
    if (ffi::Error error = find_weight(layers, i, index, p.k, *data, &weight); error.failure()) return error;
    work += p.rows * p.k * weight.outputs;
    if (biased[i]) {
      auto bias = args.get<ffi::AnyBuffer>(operand++);
      if (bias.has_error()) return bias.error();
      const auto count = static_cast<int64_t>(bias->element_count());
      if (!dtype_of(bias->element_type(), &weight.bias_dtype) || count != layers.count * weight.outputs)
        return invalid("a bias must be [layers, outputs] of float32 or bfloat16");
      const int64_t size = weight.bias_dtype == Dtype::kFloat32 ? 4 : 2;
      weight.bias = static_cast<const uint8_t*>(bias->untyped_data()) + index * weight.outputs * size;
    }
    if (static_cast<size_t>(i) >= rets.size()) continue;
    auto y = rets.get<ffi::AnyBuffer>(i);
    if (y.has_error()) return y.error();
    if (!dtype_of((*y)->element_type(), &p.y_dtype) ||
        static_cast<int64_t>((*y)->element_count()) != all_rows * weight.outputs)
      return invalid("results must be [rows, outputs] of float32 or bfloat16");
    weight.y = (*y)->untyped_data();
    // Rows nobody asked for: zeros cost less than what may lie there, an infinity or a slow denormal.
    const size_t row_bytes = (*y)->size_bytes() / std::max<int64_t>(all_rows, 1);
    std::memset(static_cast<uint8_t*>(weight.y) + p.rows * row_bytes, 0, (all_rows - p.rows) * row_bytes);
  }
  if (p.rows == 0) return ffi::Error::Success();
  prepare(x.untyped_data(), x_dtype, x8, *kernels, &p);
  if (work < kSmallWork) threads = 1;
  if (threads == 0) threads = pool.num_threads();
  parallel(pool, kernels->units(p), threads, 1, [&](int64_t first, int64_t last) { kernels->run(p, first, last); });
  return ffi::Error::Success();
}

ffi::Error embed(ffi::ThreadPool, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::Result<ffi::AnyBuffer> y,
                 int64_t kind, int64_t outputs) {
  Path best;
  find_path("", 0, &best);
  const Kernels* kernels = best.linear;
  Dtype dtype;
  if (ids.element_type() != ffi::DataType::S32) return invalid("token ids must be int32");
  if (y->dimensions().size() != 2 || !dtype_of(y->element_type(), &dtype))
    return invalid("embeddings must be a matrix of float32 or bfloat16");
  const int64_t count = y->dimensions()[0], k = y->dimensions()[1];
  if (static_cast<int64_t>(ids.element_count()) != count) return invalid("one token id for each row");
  Weight weight{};
  const int64_t offset = 0;
  const Layers layers{{&kind, 1}, {&offset, 1}, {&outputs, 1}, 1};
  if (ffi::Error error = find_weight(layers, 0, 0, k, table, &weight); error.failure()) return error;
  float* row = scratch<float, 6>(k);
  for (int64_t i = 0; i < count; ++i) {
    int64_t id = static_cast<const int32_t*>(ids.untyped_data())[i];
    id = id < 0 ? 0 : id >= outputs ? outputs - 1 : id;
    float* out = dtype == Dtype::kFloat32 ? static_cast<float*>(y->untyped_data()) + i * k : row;
    const uint8_t* tile = weight.data + id / kLanes * tile_bytes(weight.kind, k);
    kernels->row(weight.kind, tile, static_cast<int>(id % kLanes), k, out);
    if (dtype == Dtype::kBFloat16) kernels->narrow(row, k, static_cast<uint16_t*>(y->untyped_data()) + i * k);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace noria

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_linear, noria::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("kinds")
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<ffi::Span<const int64_t>>("outputs")
                                  .Attr<ffi::Span<const int64_t>>("biased")
                                  .Attr<int64_t>("activation")
                                  .Attr<bool>("x8")
                                  .Attr<std::string_view>("path")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_embed, noria::embed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("outputs"));
#pragma GCC visibility pop
