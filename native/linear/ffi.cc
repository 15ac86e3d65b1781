// The XLA custom calls noria_linear, noria_argmax and noria_embed: operands read, checked, and handed on.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "linear/compute.h"
#include "runtime/operands.h"

namespace noria {
namespace {

struct Layers {
  ffi::Span<const int64_t> kinds, offsets, outputs;  // [weights * layers] twice, [weights]
  int64_t count;
};

Weight find_weight(const Layers& layers, int index, int64_t layer, int64_t k, ffi::AnyBuffer data) {
  require(layer >= 0 && layer < layers.count, "this layer does not exist");
  const int64_t kind = layers.kinds[index * layers.count + layer], offset = layers.offsets[index * layers.count + layer];
  require(kind >= 0 && kind < kKinds, "unknown kind of weight");
  Weight weight{};
  weight.kind = static_cast<Kind>(kind);
  weight.outputs = layers.outputs[index];
  const int64_t need = ceil_div(weight.outputs, kLanes) * tile_bytes(weight.kind, k);
  require(data.element_type() == ffi::DataType::U8 && offset >= 0 &&
              offset + need <= static_cast<int64_t>(data.size_bytes()),
          "packed weight is smaller than its description says");
  weight.data = static_cast<const uint8_t*>(data.untyped_data()) + offset;
  return weight;
}

Input input_of(ffi::AnyBuffer x, bool x8) {
  require(x.dimensions().size() == 2, "x must be a matrix");
  return {x.untyped_data(), dtype_of(x), x8, {}};
}

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer where, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> offsets,
                  ffi::Span<const int64_t> outputs, ffi::Span<const int64_t> biased, int64_t activation, bool x8,
                  bool has_norm, float epsilon, float offset, bool has_post_norm, float post_epsilon,
                  float post_offset, bool has_residual, std::string_view path, int64_t threads) {
  return guarded([&] {
    const Kernels& kernels = kernels_of(path);
    Input in = input_of(x, x8);
    Problem p{};
    p.weights = static_cast<int>(outputs.size());
    p.activation = static_cast<Activation>(activation);
    const bool gated = p.activation != Activation::kNone;
    require(p.weights >= 1 && p.weights <= kMaxWeights && biased.size() == outputs.size() &&
                kinds.size() == offsets.size() && kinds.size() % p.weights == 0,
            "attributes of the weights do not match");
    require(!gated || (p.weights == 2 && outputs[0] == outputs[1]), "a gate needs two weights of one shape");
    require(rets.size() == static_cast<size_t>(gated ? 1 : p.weights), "wrong number of results");
    require(rets.size() == 1 || !(has_post_norm || has_residual), "only one result can be normalized or added to");
    const int64_t all_rows = x.dimensions()[0];
    const Place place(where, all_rows);
    p.rows = place.rows;
    p.k = x.dimensions()[1];
    const Layers layers{kinds, offsets, outputs, static_cast<int64_t>(kinds.size()) / p.weights};
    Operands operands(args, place.layer);
    for (int i = 0; i < p.weights; ++i) {
      Weight& weight = p.weight[i] = find_weight(layers, i, place.layer, p.k, operands.next());
      if (biased[i]) weight.bias = operands.vector(weight.outputs, &weight.bias_dtype);
      if (static_cast<size_t>(i) >= rets.size()) continue;
      auto y = rets.get<ffi::AnyBuffer>(i);
      require(y.has_value(), "a result is missing");
      p.y_dtype = dtype_of(**y);
      const int64_t row_bytes = weight.outputs * size_of(p.y_dtype);
      require(static_cast<int64_t>((*y)->size_bytes()) == all_rows * row_bytes, "results must be [rows, outputs]");
      weight.y = (*y)->untyped_data();
      // Rows nobody asked for: zeros cost less than what may lie there, an infinity or a slow denormal.
      std::memset(static_cast<uint8_t*>(weight.y) + p.rows * row_bytes, 0, (all_rows - p.rows) * row_bytes);
    }
    if (has_norm) in.norm = operands.norm<4>(p.k, epsilon, offset, kernels);
    if (has_post_norm) p.post_norm = operands.norm<5>(p.weight[0].outputs, post_epsilon, post_offset, kernels);
    if (has_residual) {
      const ffi::AnyBuffer residual = operands.next();
      require(dtype_of(residual) == p.y_dtype &&
                  static_cast<int64_t>(residual.element_count()) == all_rows * p.weight[0].outputs,
              "the residual must be like the result");
      p.residual = residual.untyped_data();
    }
    if (p.rows > 0) compute(pool, kernels, in, pool_threads(pool, threads), &p);
  });
}

ffi::Error argmax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer where, ffi::RemainingArgs args,
                  ffi::Result<ffi::AnyBuffer> largest, int64_t kind, int64_t outputs, int64_t choices, bool x8,
                  bool has_norm, float epsilon, float offset, std::string_view path, int64_t threads) {
  return guarded([&] {
    const Kernels& kernels = kernels_of(path);
    Input in = input_of(x, x8);
    const int64_t all_rows = x.dimensions()[0], start = 0;
    const Place place(where, all_rows);
    require(largest->element_type() == ffi::DataType::S32 && static_cast<int64_t>(largest->element_count()) == all_rows,
            "the result must be one int32 for each row");
    require(choices >= 1 && choices <= outputs, "the choices must be some of the outputs");
    Problem p{};
    p.rows = place.rows;
    p.k = x.dimensions()[1];
    p.weights = 1;
    p.choices = choices;
    const Layers layers{{&kind, 1}, {&start, 1}, {&outputs, 1}, 1};
    Operands operands(args, place.layer);
    p.weight[0] = find_weight(layers, 0, place.layer, p.k, operands.next());
    if (has_norm) in.norm = operands.norm<4>(p.k, epsilon, offset, kernels);
    auto* result = static_cast<int32_t*>(largest->untyped_data());
    std::fill(result + p.rows, result + all_rows, -1);
    if (p.rows > 0) compute_argmax(pool, kernels, in, pool_threads(pool, threads), &p, result);
  });
}

ffi::Error embed(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::Result<ffi::AnyBuffer> y,
                 int64_t kind, int64_t outputs) {
  return guarded([&] {
    const Kernels& kernels = kernels_of("");
    require(ids.element_type() == ffi::DataType::S32, "token ids must be int32");
    require(y->dimensions().size() == 2, "embeddings must be a matrix");
    const Dtype dtype = dtype_of(*y);
    const int64_t count = y->dimensions()[0], k = y->dimensions()[1], start = 0;
    require(static_cast<int64_t>(ids.element_count()) == count, "one token id for each row");
    const Layers layers{{&kind, 1}, {&start, 1}, {&outputs, 1}, 1};
    const Weight weight = find_weight(layers, 0, 0, k, table);
    each_row(pool, count, k, pool_threads(pool, 0), [&](int64_t i) {
      int64_t id = static_cast<const int32_t*>(ids.untyped_data())[i];
      id = std::clamp<int64_t>(id, 0, outputs - 1);
      float* row = dtype == Dtype::kFloat32 ? static_cast<float*>(y->untyped_data()) + i * k : scratch<float, 6>(k);
      const uint8_t* tile = weight.data + id / kLanes * tile_bytes(weight.kind, k);
      kernels.row(weight.kind, tile, static_cast<int>(id % kLanes), k, row);
      if (dtype == Dtype::kBFloat16) kernels.narrow(row, k, static_cast<uint16_t*>(y->untyped_data()) + i * k);
    });
  });
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
                                  .Attr<bool>("norm")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset")
                                  .Attr<bool>("post_norm")
                                  .Attr<float>("post_epsilon")
                                  .Attr<float>("post_offset")
                                  .Attr<bool>("residual")
                                  .Attr<std::string_view>("path")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_argmax, noria::argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("outputs")
                                  .Attr<int64_t>("choices")
                                  .Attr<bool>("x8")
                                  .Attr<bool>("norm")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset")
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
