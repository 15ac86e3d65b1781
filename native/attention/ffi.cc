// The XLA custom call noria_ragged_paged_attention: operands checked, then handed to run.h.
#include <string_view>

#include "attention/run.h"
#include "runtime/operands.h"

namespace noria::attention {
namespace {

const int32_t* indices(ffi::AnyBuffer buffer, int64_t count, const char* message) {
  require(buffer.element_type() == ffi::DataType::S32 && static_cast<int64_t>(buffer.element_count()) == count, message);
  return static_cast<const int32_t*>(buffer.untyped_data());
}

bool same_shape(ffi::AnyBuffer a, ffi::AnyBuffer b) {
  const auto x = a.dimensions(), y = b.dimensions();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

void fill_activations(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer out, Problem* p) {
  p->dtype = dtype_of(q);
  for (const ffi::AnyBuffer other : {k, v, out})
    require(dtype_of(other) == p->dtype, "queries, keys, values and results must have one type");
  require(q.dimensions().size() == 3 && k.dimensions().size() == 3 && same_shape(k, v) && same_shape(q, out),
          "queries and results must be [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]");
  p->tokens = q.dimensions()[0], p->heads = q.dimensions()[1], p->head_dim = q.dimensions()[2];
  p->kv_heads = k.dimensions()[1];
  require(k.dimensions()[0] == p->tokens && k.dimensions()[2] == p->head_dim && p->kv_heads >= 1 && p->head_dim >= 1 &&
              p->heads % p->kv_heads == 0,
          "keys do not fit the queries: the heads must be a multiple of the KV heads");
  p->q = q.untyped_data(), p->k = k.untyped_data(), p->v = v.untyped_data(), p->out = out.untyped_data();
}

// data: the cache as operand and as result, which must be the same memory.
void fill_cache(ffi::AnyBuffer data, ffi::AnyBuffer result, int64_t dtype, Problem* p) {
  require(dtype >= 0 && dtype < kCacheDtypes, "unknown dtype of the cache");
  p->cache_dtype = static_cast<CacheDtype>(dtype);
  const auto shape = data.dimensions();
  require(shape.size() == 5 && shape[1] >= 1 && shape[2] == p->kv_heads && shape[3] == 2 && shape[4] == p->head_dim,
          "the cache must be [blocks, block_size, kv_heads, 2, head_dim]");
  require(static_cast<int64_t>(data.size_bytes()) ==
              static_cast<int64_t>(data.element_count()) * cell_bytes(p->cache_dtype),
          "the cache is of another dtype than it says");
  require(data.untyped_data() == result.untyped_data(), "the cache was copied");
  p->cache = static_cast<uint8_t*>(data.untyped_data());
  p->cache_blocks = shape[0], p->block_size = shape[1];
}

void fill_scale(ffi::RemainingArgs args, ffi::RemainingRets rets, Problem* p) {
  const size_t count = p->cache_dtype == CacheDtype::kInt8 ? 1 : 0;
  require(args.size() == count && rets.size() == count, "int8, and no other cache, has scales");
  if (count == 0) return;
  auto scale = args.get<ffi::AnyBuffer>(0);
  auto result = rets.get<ffi::AnyBuffer>(0);
  require(scale.has_value() && result.has_value(), "the scales are missing");
  require(scale->element_type() == ffi::DataType::F32 &&
              static_cast<int64_t>(scale->element_count()) == p->cache_blocks * p->block_size * p->kv_heads * 2,
          "scales must be float32 [blocks, block_size, kv_heads, 2]");
  require(scale->untyped_data() == (*result)->untyped_data(), "the scales were copied");
  p->cache_scale = static_cast<float*>(scale->untyped_data());
}

// layer: group, offset, window.
void fill_batch(ffi::AnyBuffer token_rows, ffi::AnyBuffer positions, ffi::AnyBuffer query_start, ffi::AnyBuffer seq_lens,
                ffi::AnyBuffer tables, ffi::AnyBuffer layer, Problem* p) {
  p->rows = static_cast<int64_t>(seq_lens.element_count());
  p->token_rows = indices(token_rows, p->tokens, "token_rows must be int32 [tokens]");
  p->positions = indices(positions, p->tokens, "positions must be int32 [tokens]");
  p->query_start = indices(query_start, p->rows + 1, "query_start must be int32 [rows + 1]");
  p->seq_lens = indices(seq_lens, p->rows, "seq_lens must be int32 [rows]");
  const auto shape = tables.dimensions();
  require(shape.size() == 3 && shape[1] == p->rows, "block_tables must be [groups, rows, blocks]");
  const int32_t* all = indices(tables, shape[0] * shape[1] * shape[2], "block_tables must be int32");
  const int32_t* where = indices(layer, 3, "the layer's group, offset and window must be three int32");
  require(where[0] >= 0 && where[0] < shape[0], "this cache group does not exist");
  p->offset = where[1], p->window = where[2];
  p->table_width = shape[2];
  p->table = all + where[0] * p->rows * p->table_width;
  const char* mistake = find_mistake(*p);
  require(mistake == nullptr, mistake);
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer token_rows,
                     ffi::AnyBuffer positions, ffi::AnyBuffer query_start, ffi::AnyBuffer seq_lens,
                     ffi::AnyBuffer tables, ffi::AnyBuffer layer, ffi::AnyBuffer cache, ffi::RemainingArgs scale_in,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> cache_out,
                     ffi::RemainingRets scale_out, int64_t cache_dtype, float scale, float soft_cap,
                     std::string_view path, int64_t threads) {
  return guarded([&] {
    Problem p{};
    p.scale = scale, p.soft_cap = soft_cap;
    fill_activations(q, k, v, *out, &p);
    fill_cache(cache, *cache_out, cache_dtype, &p);
    fill_scale(scale_in, scale_out, &p);
    fill_batch(token_rows, positions, query_start, seq_lens, tables, layer, &p);
    run(pool, p, *path_of(path).attention, pool_threads(pool, threads));
  });
}

// Leaves its results as they were allocated: pages that nobody has touched cost no memory.
ffi::Error uninitialized(ffi::RemainingRets) { return ffi::Error::Success(); }

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(noria_uninitialized, noria::attention::uninitialized, ffi::Ffi::Bind().RemainingRets());
#pragma GCC visibility pop
