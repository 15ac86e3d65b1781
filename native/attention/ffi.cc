// The XLA custom call noria_ragged_paged_attention: operands checked, then handed to run.h.
#include <string>
#include <string_view>

#include "attention/run.h"
#include "runtime/cpu.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace noria::attention {
namespace {

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("noria: " + message); }

bool same_shape(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  const auto x = a.dimensions(), y = b.dimensions();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}
bool is_indices(const ffi::AnyBuffer& buffer, int64_t count) {
  return buffer.element_type() == ffi::DataType::S32 && static_cast<int64_t>(buffer.element_count()) == count;
}
const int32_t* indices(const ffi::AnyBuffer& buffer) { return static_cast<const int32_t*>(buffer.untyped_data()); }

ffi::Error fill_activations(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                            const ffi::AnyBuffer& out, Problem* p) {
  const auto type = q.element_type();
  if (type != ffi::DataType::F32 && type != ffi::DataType::BF16) return invalid("queries must be float32 or bfloat16");
  for (const ffi::AnyBuffer* other : {&k, &v, &out})
    if (other->element_type() != type) return invalid("queries, keys, values and results must have one type");
  if (q.dimensions().size() != 3 || k.dimensions().size() != 3 || !same_shape(k, v) || !same_shape(q, out))
    return invalid("queries and results must be [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]");
  p->dtype = type == ffi::DataType::F32 ? Dtype::kFloat32 : Dtype::kBFloat16;
  p->tokens = q.dimensions()[0], p->heads = q.dimensions()[1], p->head_dim = q.dimensions()[2];
  p->kv_heads = k.dimensions()[1];
  if (k.dimensions()[0] != p->tokens || k.dimensions()[2] != p->head_dim || p->kv_heads < 1 || p->head_dim < 1 ||
      p->heads % p->kv_heads != 0)
    return invalid("keys do not fit the queries: the heads must be a multiple of the KV heads");
  p->q = q.untyped_data(), p->k = k.untyped_data(), p->v = v.untyped_data(), p->out = out.untyped_data();
  return ffi::Error::Success();
}

// data: the cache as operand and as result, which must be the same memory.
ffi::Error fill_cache(const ffi::AnyBuffer& data, const ffi::AnyBuffer& result, int64_t dtype, Problem* p) {
  if (dtype < 0 || dtype >= kCacheDtypes) return invalid("unknown dtype of the cache");
  p->cache_dtype = static_cast<CacheDtype>(dtype);
  const auto shape = data.dimensions();
  if (shape.size() != 5 || shape[1] < 1 || shape[2] != p->kv_heads || shape[3] != 2 || shape[4] != p->head_dim ||
      static_cast<int64_t>(data.size_bytes()) !=
          static_cast<int64_t>(data.element_count()) * cell_bytes(p->cache_dtype))
    return invalid("the cache must be [blocks, block_size, kv_heads, 2, head_dim] of its dtype");
  if (data.untyped_data() != result.untyped_data()) return invalid("the cache was copied");
  p->cache = static_cast<uint8_t*>(data.untyped_data());
  p->cache_blocks = shape[0], p->block_size = shape[1];
  return ffi::Error::Success();
}

ffi::Error fill_scale(ffi::RemainingArgs args, ffi::RemainingRets rets, Problem* p) {
  const size_t count = p->cache_dtype == CacheDtype::kInt8 ? 1 : 0;
  if (args.size() != count || rets.size() != count) return invalid("int8, and no other cache, has scales");
  if (count == 0) return ffi::Error::Success();
  auto scale = args.get<ffi::AnyBuffer>(0);
  if (scale.has_error()) return scale.error();
  auto result = rets.get<ffi::AnyBuffer>(0);
  if (result.has_error()) return result.error();
  if (scale->element_type() != ffi::DataType::F32 ||
      static_cast<int64_t>(scale->element_count()) != p->cache_blocks * p->block_size * p->kv_heads * 2)
    return invalid("scales must be float32 [blocks, block_size, kv_heads, 2]");
  if (scale->untyped_data() != (*result)->untyped_data()) return invalid("the scales were copied");
  p->cache_scale = static_cast<float*>(scale->untyped_data());
  return ffi::Error::Success();
}

// layer: group, offset, window.
ffi::Error fill_batch(const ffi::AnyBuffer& token_rows, const ffi::AnyBuffer& positions,
                      const ffi::AnyBuffer& query_start, const ffi::AnyBuffer& seq_lens, const ffi::AnyBuffer& tables,
                      const ffi::AnyBuffer& layer, Problem* p) {
  const auto shape = tables.dimensions();
  p->rows = static_cast<int64_t>(seq_lens.element_count());
  if (!is_indices(token_rows, p->tokens) || !is_indices(positions, p->tokens))
    return invalid("token_rows and positions must be int32 [tokens]");
  if (!is_indices(query_start, p->rows + 1) || !is_indices(seq_lens, p->rows))
    return invalid("query_start must be int32 [rows + 1] and seq_lens int32 [rows]");
  if (shape.size() != 3 || shape[1] != p->rows || !is_indices(tables, shape[0] * shape[1] * shape[2]))
    return invalid("block_tables must be int32 [groups, rows, blocks]");
  if (!is_indices(layer, 3)) return invalid("the layer's group, offset and window must be three int32");
  const int64_t group = indices(layer)[0];
  if (group < 0 || group >= shape[0]) return invalid("cache group " + std::to_string(group) + " does not exist");
  p->offset = indices(layer)[1], p->window = indices(layer)[2];
  p->token_rows = indices(token_rows), p->positions = indices(positions);
  p->query_start = indices(query_start), p->seq_lens = indices(seq_lens);
  p->table_width = shape[2];
  p->table = indices(tables) + group * p->rows * p->table_width;
  const char* mistake = find_mistake(*p);
  return mistake ? invalid(mistake) : ffi::Error::Success();
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer token_rows,
                     ffi::AnyBuffer positions, ffi::AnyBuffer query_start, ffi::AnyBuffer seq_lens,
                     ffi::AnyBuffer tables, ffi::AnyBuffer layer, ffi::AnyBuffer cache, ffi::RemainingArgs scale_in,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> cache_out,
                     ffi::RemainingRets scale_out, int64_t cache_dtype, float scale, float soft_cap,
                     std::string_view path, int64_t threads) {
  Path found;
  if (!find_path(path.data(), path.size(), &found)) return invalid("this processor has no path " + std::string(path));
  Problem p{};
  p.scale = scale, p.soft_cap = soft_cap;
  if (ffi::Error error = fill_activations(q, k, v, *out, &p); error.failure()) return error;
  if (ffi::Error error = fill_cache(cache, *cache_out, cache_dtype, &p); error.failure()) return error;
  if (ffi::Error error = fill_scale(scale_in, scale_out, &p); error.failure()) return error;
  if (ffi::Error error = fill_batch(token_rows, positions, query_start, seq_lens, tables, layer, &p); error.failure())
    return error;
  run(pool, p, *found.attention, threads == 0 ? pool.num_threads() : threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace noria::attention

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_ragged_paged_attention, noria::attention::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("cache_dtype")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<std::string_view>("path")
                                  .Attr<int64_t>("threads"));
#pragma GCC visibility pop
