// The XLA custom calls noria_linear and noria_embed: operands checked, activations prepared, units shared among threads.
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "linear/types.h"
#include "runtime/cpu.h"
#include "runtime/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace noria {
namespace {

constexpr int64_t kManyRows = 16;        // that copying them to a better place pays
constexpr int64_t kSmallWork = 1 << 15;  // multiply-adds below which waking a thread costs more than it gains

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("noria: " + message); }

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

bool dtype_of(ffi::DataType type, Dtype* out) {
  if (type != ffi::DataType::F32 && type != ffi::DataType::BF16) return false;
  *out = type == ffi::DataType::F32 ? Dtype::kFloat32 : Dtype::kBFloat16;
  return true;
}

// Rows of `width` elements into rows of `stride`, the rest zero.
template <typename T>
void pad_rows(const T* from, int64_t rows, int64_t width, T* to, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * stride, from + row * width, width * sizeof(T));
    std::memset(to + row * stride + width, 0, (stride - width) * sizeof(T));
  }
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

// Activations in the forms that the weights need.
void prepare_x(const ffi::AnyBuffer& x, Dtype dtype, bool x8, const Kernels& kernels, Problem* p) {
  int64_t block = x8 ? 32 : 1;
  for (int i = 0; i < p->weights; ++i) {
    const int64_t own = shape_of(p->weight[i].kind).block;
    block = own > block ? own : block;  // all blocks are powers of two
  }
  p->row_stride = ceil_div(p->k, block) * block;
  // Rows whose addresses differ by a multiple of a page compete for the same few places in the first-level cache.
  if (p->rows >= kManyRows && p->row_stride % 512 == 0) p->row_stride += 32;
  const int64_t count = p->rows * p->row_stride;
  const bool padded = p->row_stride != p->k;
  if (dtype == Dtype::kBFloat16) {
    p->x16 = static_cast<const uint16_t*>(x.untyped_data());
    if (padded) {
      uint16_t* wide = scratch<uint16_t, 0>(count);
      pad_rows(p->x16, p->rows, p->k, wide, p->row_stride);
      p->x16 = wide;
    }
    float* widened = scratch<float, 1>(count);
    kernels.widen(p->x16, count, widened);
    p->x = widened;
  } else {
    p->x = static_cast<const float*>(x.untyped_data());
    if (padded) {
      float* wide = scratch<float, 2>(count);
      pad_rows(p->x, p->rows, p->k, wide, p->row_stride);
      p->x = wide;
    }
  }
  if (x8) {
    int8_t* q = scratch<int8_t, 3>(count);
    float *scale = scratch<float, 4>(count / 32), *sum = scratch<float, 5>(count / 16);
    kernels.quantize(p->x, count, q, scale, sum);
    p->x8 = q, p->x8_scale = scale, p->x8_sum = sum;
  }
}

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer layer, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> offsets,
                  ffi::Span<const int64_t> outputs, ffi::Span<const int64_t> biased, int64_t activation, bool x8,
                  std::string_view path, int64_t threads) {
  const Kernels* kernels = find_kernels(path.data(), path.size());
  if (kernels == nullptr) return invalid("this processor has no path " + std::string(path));
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
  if (layer.element_type() != ffi::DataType::S32 || layer.element_count() != 1)
    return invalid("the layer index must be one int32");
  if (gated && (p.weights != 2 || outputs[0] != outputs[1])) return invalid("a gate needs two weights of one shape");
  if (rets.size() != static_cast<size_t>(gated ? 1 : p.weights)) return invalid("wrong number of results");
  p.rows = x.dimensions()[0];
  p.k = x.dimensions()[1];
  const Layers layers{kinds, offsets, outputs, static_cast<int64_t>(kinds.size()) / p.weights};
  const int64_t index = *static_cast<const int32_t*>(layer.untyped_data());
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
        static_cast<int64_t>((*y)->element_count()) != p.rows * weight.outputs)
      return invalid("results must be [rows, outputs] of float32 or bfloat16");
    weight.y = (*y)->untyped_data();
  }
  if (p.rows == 0) return ffi::Error::Success();
  prepare_x(x, x_dtype, x8, *kernels, &p);
  if (work < kSmallWork) threads = 1;
  if (threads == 0) threads = pool.num_threads();
  parallel(pool, kernels->units(p), threads, 1, [&](int64_t first, int64_t last) { kernels->run(p, first, last); });
  return ffi::Error::Success();
}

ffi::Error embed(ffi::ThreadPool, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::Result<ffi::AnyBuffer> y,
                 int64_t kind, int64_t outputs) {
  const Kernels* kernels = find_kernels("", 0);
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
