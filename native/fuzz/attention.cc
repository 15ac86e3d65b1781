// Random batches through every path of ragged paged attention, in memory that ends where the data ends.
//
// Built with AddressSanitizer and UBSan (make fuzz): a byte read or written outside is an error. Besides, every path
// must agree with the portable one, must leave the same bits in the cache, and must make each token's bits from any
// chunk of its sequence.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "attention/run.h"
#include "fuzz/tools.h"
#include "runtime/cpu.h"

namespace noria::attention {
namespace {

using Bytes = std::vector<uint8_t>;

struct Case {
  Problem p;                           // without pointers
  std::vector<int64_t> first, length;  // of each row: tokens at positions first .. length - 1; length 0: padding
  std::vector<int32_t> table;
  Bytes q, k, v, cache;
  std::vector<float> cache_scale;
};

int64_t number_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

Bytes numbers(Random& random, Dtype dtype, int64_t count) {
  const std::vector<float> values = floats(random, count);
  const int64_t size = number_bytes(dtype);
  Bytes bytes(count * size);
  for (int64_t i = 0; i < count; ++i)  // bfloat16: the upper half of a little-endian float
    std::memcpy(&bytes[i * size], reinterpret_cast<const uint8_t*>(&values[i]) + 4 - size, size);
  return bytes;
}

// Any bits at all, as others may leave them: infinities and NaNs too. What a row has computed is finite.
void fill_cache(Random& random, Case* c) {
  const Problem& p = c->p;
  const int64_t size = cell_bytes(p.cache_dtype), vector = p.head_dim * size;
  const int64_t vectors = p.cache_blocks * p.block_size * p.kv_heads * 2;
  c->cache.resize(vectors * vector);
  for (uint8_t& byte : c->cache) byte = random() % 8 ? static_cast<uint8_t>(random()) : 0xff;
  if (p.cache_dtype == CacheDtype::kInt8) {
    c->cache_scale.resize(vectors);
    for (float& scale : c->cache_scale) scale = std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t position = 0; position < c->first[row]; ++position) {
      const int64_t block = p.offset + c->table[row * p.table_width + position / p.block_size];
      const int64_t at = (block * p.block_size + position % p.block_size) * p.kv_heads * 2;
      for (int64_t i = at; i < at + p.kv_heads * 2; ++i) {
        if (!c->cache_scale.empty()) c->cache_scale[i] = 0.01f;
        for (int64_t last = i * vector + size - 1; last < (i + 1) * vector; last += size)
          c->cache[last] &= 0xbf;  // without the upper bit of the exponent: below 2
      }
    }
  }
}

Case draw(Random& random) {
  Case c{};
  Problem& p = c.p;
  const int64_t dims[] = {64, 80, 128, 256};
  p.head_dim = random() % 2 ? dims[random() % 4] : between(random, 1, 100);
  p.kv_heads = between(random, 1, 3);
  p.heads = p.kv_heads * (random() % 16 ? between(random, 1, 5) : between(random, 90, 130) / p.kv_heads);
  p.dtype = static_cast<Dtype>(random() % 2);
  p.cache_dtype = static_cast<CacheDtype>(random() % kCacheDtypes);
  p.block_size = random() % 2 ? 16 : between(random, 1, 70);
  p.window = random() % 2 ? 1 << 30 : between(random, 1, 200);
  p.scale = 0.3f;
  p.soft_cap = random() % 4 ? 0.0f : 5.0f;
  const bool wide = p.heads * p.head_dim > 2000;
  p.rows = between(random, 1, 4);
  int64_t longest = 1;
  for (int64_t row = 0; row < p.rows; ++row) {
    const bool decode = random() % 2, padding = random() % 8 == 0;
    const int64_t length = padding ? 0 : between(random, 1, random() % 8 == 0 && !wide ? 400 : 90);
    c.length.push_back(length);
    c.first.push_back(padding ? 0 : decode ? length - 1 : between(random, 0, length - 1));
    longest = std::max(longest, length);
  }
  p.table_width = ceil_div(longest, p.block_size);
  p.offset = between(random, 0, 3);
  p.cache_blocks = p.offset + 1 + p.rows * p.table_width;
  std::vector<int32_t> ids(p.rows * p.table_width);
  std::iota(ids.begin(), ids.end(), 1);
  std::shuffle(ids.begin(), ids.end(), random);
  c.table = ids;
  for (int64_t row = 0; row < p.rows; ++row) {  // what is out of sight need not be there
    const int64_t used = ceil_div(c.length[row], p.block_size);
    for (int64_t i = used; i < p.table_width; ++i) c.table[row * p.table_width + i] = 0x7fffff00;
  }
  p.tokens = between(random, 0, 5);  // padding after the rows' own
  for (int64_t row = 0; row < p.rows; ++row) p.tokens += std::max<int64_t>(c.length[row] - c.first[row], 1);
  c.q = numbers(random, p.dtype, p.tokens * p.heads * p.head_dim);
  c.k = numbers(random, p.dtype, p.tokens * p.kv_heads * p.head_dim);
  c.v = numbers(random, p.dtype, p.tokens * p.kv_heads * p.head_dim);
  fill_cache(random, &c);
  return c;
}

struct Result {
  Bytes out, cache;
  std::vector<float> cache_scale;
};

void fail(const Case& c, const char* path, const char* what) {
  const Problem& p = c.p;
  std::printf("%s on %s: heads %lld of %lld, head_dim %lld, dtype %d, cache %d, block %lld, window %lld, cap %g;", what,
              path, (long long)p.heads, (long long)p.kv_heads, (long long)p.head_dim, (int)p.dtype, (int)p.cache_dtype,
              (long long)p.block_size, (long long)p.window, p.soft_cap);
  for (size_t row = 0; row < c.first.size(); ++row)
    std::printf(" %lld..%lld", (long long)c.first[row], (long long)c.length[row]);
  std::printf("\n");
  std::exit(1);
}

// The case with other bounds of its rows' tokens, `taken` of each row: those of the case from `skipped` on.
Result run_on(const Case& c, const char* path, const Kernels& kernels, const Result& before,
              const std::vector<int64_t>& skipped, const std::vector<int64_t>& taken, int64_t padding, int64_t threads) {
  Problem p = c.p;
  const int64_t size = number_bytes(p.dtype), head = p.head_dim * size;
  std::vector<int32_t> token_rows, positions, query_start{0}, seq_lens;
  Bytes q, k, v;
  int64_t base = 0;
  const auto append = [](Bytes* to, const Bytes& from, int64_t at, int64_t count) {
    to->insert(to->end(), from.begin() + at, from.begin() + at + count);
  };
  const auto add_token = [&](int64_t source, int64_t row, int64_t position) {
    append(&q, c.q, source * p.heads * head, p.heads * head);
    append(&k, c.k, source * p.kv_heads * head, p.kv_heads * head);
    append(&v, c.v, source * p.kv_heads * head, p.kv_heads * head);
    token_rows.push_back(static_cast<int32_t>(row));
    positions.push_back(static_cast<int32_t>(position));
  };
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t start = c.first[row] + skipped[row];
    for (int64_t i = 0; i < taken[row]; ++i) add_token(base + skipped[row] + i, row, start + i);
    const bool none = c.length[row] == 0;
    if (none) add_token(base, p.rows, 0);
    query_start.push_back(static_cast<int32_t>(token_rows.size()));
    seq_lens.push_back(static_cast<int32_t>(none ? 0 : start + taken[row]));
    base += std::max<int64_t>(c.length[row] - c.first[row], 1);
  }
  for (int64_t i = 0; i < padding; ++i) add_token(0, p.rows, 0);
  q.shrink_to_fit(), k.shrink_to_fit(), v.shrink_to_fit();
  Result r = before;
  p.tokens = static_cast<int64_t>(token_rows.size());
  r.out.assign(p.tokens * p.heads * head, 0xff);
  p.q = q.data(), p.k = k.data(), p.v = v.data(), p.out = r.out.data();
  p.cache = r.cache.data(), p.cache_scale = r.cache_scale.empty() ? nullptr : r.cache_scale.data();
  token_rows.shrink_to_fit(), positions.shrink_to_fit(), query_start.shrink_to_fit(), seq_lens.shrink_to_fit();
  p.token_rows = token_rows.data(), p.positions = positions.data();
  p.query_start = query_start.data(), p.seq_lens = seq_lens.data(), p.table = c.table.data();
  if (const char* mistake = find_mistake(p)) fail(c, path, mistake);
  Threads pool;
  run(pool, p, kernels, threads);
  return r;
}

float value_at(const Bytes& bytes, Dtype dtype, int64_t i) {
  float value = 0;
  const int64_t size = number_bytes(dtype);
  std::memcpy(reinterpret_cast<uint8_t*>(&value) + 4 - size, &bytes[i * size], size);
  return value;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {  // of which some are NaN
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) { return std::memcmp(&x, &y, 4) == 0; });
}

void compare(const Case& c, const char* path, const Result& want, const Result& got) {
  if (got.cache != want.cache || !same_bits(got.cache_scale, want.cache_scale))
    fail(c, path, "writes another cache than portable");
  const auto count = static_cast<int64_t>(got.out.size()) / number_bytes(c.p.dtype);
  for (int64_t i = 0; i < count; ++i) {
    const float w = value_at(want.out, c.p.dtype, i), off = value_at(got.out, c.p.dtype, i) - w;
    const float tolerance = c.p.dtype == Dtype::kFloat32 ? 5e-5f : 1e-2f;
    if (!(std::fabs(off) <= tolerance * (1 + std::fabs(w)))) fail(c, path, "differs from portable, or is not finite");
  }
}

// In two steps, cut anywhere: the tokens' bits must be those of one step.
void check_chunks(Random& random, const Case& c, const Path& path, const Result& start, const Result& whole) {
  const int64_t rows = c.p.rows, bytes = c.p.heads * c.p.head_dim * number_bytes(c.p.dtype);
  std::vector<int64_t> none(rows, 0), head(rows), tail(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t tokens = c.length[row] - c.first[row];
    head[row] = between(random, 0, tokens), tail[row] = tokens - head[row];
  }
  const Kernels& kernels = *path.attention;
  const Result first = run_on(c, path.name, kernels, start, none, head, 0, between(random, 1, 3));
  const Result second = run_on(c, path.name, kernels, first, head, tail, 1, between(random, 1, 3));
  if (second.cache != whole.cache) fail(c, path.name, "the cache depends on chunks");
  int64_t at = 0, at_first = 0, at_second = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t padding = c.length[row] == 0;
    const auto same = [&](const Bytes& part, int64_t* from, int64_t count) {
      const auto begin = part.begin() + *from * bytes;
      if (!std::equal(begin, begin + count * bytes, whole.out.begin() + at * bytes))
        fail(c, path.name, "a token depends on its chunk");
      *from += count + padding, at += count;
    };
    same(first.out, &at_first, head[row]);
    same(second.out, &at_second, tail[row]);
    at += padding;
  }
}

void check(Random& random, const Case& c) {
  Path paths[kMaxPaths];
  const int count = available_paths(paths);
  const Result start{{}, c.cache, c.cache_scale};
  std::vector<int64_t> none(c.p.rows, 0), all;
  int64_t padding = c.p.tokens;
  for (int64_t row = 0; row < c.p.rows; ++row) {
    all.push_back(c.length[row] - c.first[row]);
    padding -= std::max<int64_t>(all.back(), 1);
  }
  Result want;
  for (int i = 0; i < count; ++i) {
    const Result got = run_on(c, paths[i].name, *paths[i].attention, start, none, all, padding, between(random, 1, 3));
    if (i == 0) want = got;
    compare(c, paths[i].name, want, got);
    check_chunks(random, c, paths[i], start, got);
  }
}

}  // namespace
}  // namespace noria::attention

void noria::fuzz_attention(Random& random, int rounds) {
  for (int i = 0; i < rounds; ++i) attention::check(random, attention::draw(random));
}
