// Random shapes through packing and every path of the linear op, in memory that ends where the data ends.
//
// Built with AddressSanitizer and UBSan (make fuzz): a byte read or written outside is an error. Besides, every path
// must agree with the portable one, and every row with the same row alone.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fuzz/tools.h"
#include "linear/compute.h"
#include "runtime/cpu.h"

extern "C" {
int64_t noria_packed_bytes(int32_t kind, int64_t outputs, int64_t k);
void noria_pack(int32_t kind, const uint8_t* source, int64_t row_bytes, const int32_t* order, int64_t outputs, int64_t k,
                int64_t first_tile, int64_t last_tile, uint8_t* packed);
}

namespace noria {
namespace {

struct SourceBlock {
  int64_t bytes, half[2];  // size in a file, and where the half-precision scales lie (-1: none)
};
SourceBlock source_block(Kind kind) {
  switch (kind) {
    case Kind::kQ8_0: return {34, {0, -1}};
    case Kind::kQ4_0: return {18, {0, -1}};
    case Kind::kQ4_1: return {20, {0, 2}};
    case Kind::kQ5_0: return {22, {0, -1}};
    case Kind::kQ5_1: return {24, {0, 2}};
    case Kind::kQ4_K: return {144, {0, 2}};
    case Kind::kQ5_K: return {176, {0, 2}};
    case Kind::kQ6_K: return {210, {208, -1}};
    default: return {0, {-1, -1}};
  }
}

// Rows as a checkpoint has them.
std::vector<uint8_t> source_rows(Random& random, Kind kind, int64_t outputs, int64_t k, int64_t* row_bytes) {
  const SourceBlock block = source_block(kind);
  if (block.bytes == 0) {
    const std::vector<float> values = floats(random, outputs * k);
    const int64_t size = kind == Kind::kBFloat16 ? 2 : 4;
    std::vector<uint8_t> rows(values.size() * size);
    for (size_t i = 0; i < values.size(); ++i)  // bfloat16: the upper half of a little-endian float
      std::memcpy(&rows[i * size], reinterpret_cast<const uint8_t*>(&values[i]) + 4 - size, size);
    *row_bytes = k * size;
    return rows;
  }
  std::vector<uint8_t> rows(outputs * k / shape_of(kind).block * block.bytes);
  for (auto& byte : rows) byte = static_cast<uint8_t>(random());
  for (size_t at = 0; at < rows.size(); at += block.bytes)
    for (int64_t half : block.half)
      if (half >= 0) rows[at + half + 1] = (rows[at + half + 1] & 0x83) | 0x20;  // of moderate size, either sign
  *row_bytes = k / shape_of(kind).block * block.bytes;
  return rows;
}

std::vector<uint8_t> pack(Random& random, Kind kind, int64_t outputs, int64_t k) {
  int64_t row_bytes = 0;
  const std::vector<uint8_t> rows = source_rows(random, kind, outputs, k, &row_bytes);
  std::vector<int32_t> order(outputs);
  for (int64_t i = 0; i < outputs; ++i) order[i] = static_cast<int32_t>(outputs - 1 - i);
  std::vector<uint8_t> packed(noria_packed_bytes(static_cast<int32_t>(kind), outputs, k));
  const int64_t tiles = ceil_div(outputs, kLanes), cut = between(random, 0, tiles);
  const int32_t* shuffle = random() % 2 ? order.data() : nullptr;
  const auto number = static_cast<int32_t>(kind);
  noria_pack(number, rows.data(), row_bytes, shuffle, outputs, k, 0, cut, packed.data());
  noria_pack(number, rows.data(), row_bytes, shuffle, outputs, k, cut, tiles, packed.data());
  return packed;
}

struct Case {
  int64_t rows, k;
  std::vector<Kind> kinds;
  std::vector<int64_t> outputs;
  std::vector<std::vector<uint8_t>> packed;
  std::vector<std::vector<float>> biases;  // empty: none
  std::vector<float> x, residual, norm, post_norm;  // the last three: empty for none
  std::vector<uint16_t> x16;
  Dtype dtype, y_dtype;
  bool x8;
  Activation activation;
};

Case draw(Random& random) {
  Case c;
  c.activation = static_cast<Activation>(random() % 4 < 2 ? 0 : between(random, 1, 2));
  const int count = c.activation == Activation::kNone ? static_cast<int>(between(random, 1, 3)) : 2;
  int64_t block = 1;
  for (int i = 0; i < count; ++i) {
    c.kinds.push_back(static_cast<Kind>(between(random, 0, kKinds - 1)));
    if (source_block(c.kinds[i]).bytes) block = std::max(block, shape_of(c.kinds[i]).block);
  }
  c.k = block == 1 ? between(random, 1, 700) : block * between(random, 1, 1 + 700 / block);
  c.rows = random() % 8 == 0 ? between(random, 90, 220) : between(random, 1, 30);
  for (int i = 0; i < count; ++i) {
    const bool same = i == 1 && c.activation != Activation::kNone;
    c.outputs.push_back(same ? c.outputs[0] : between(random, 1, 80));
    c.packed.push_back(pack(random, c.kinds[i], c.outputs[i], c.k));
    c.biases.push_back(random() % 2 ? floats(random, c.outputs[i]) : std::vector<float>());
  }
  if (count == 1 || c.activation != Activation::kNone) {
    if (random() % 2) c.residual = floats(random, c.rows * c.outputs[0]);
    if (random() % 2) c.post_norm = floats(random, c.outputs[0]);
  }
  if (random() % 2) c.norm = floats(random, c.k);
  c.x = floats(random, c.rows * c.k);
  c.dtype = static_cast<Dtype>(random() % 2);
  c.y_dtype = static_cast<Dtype>(random() % 2);
  for (float& value : c.x) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    c.x16.push_back(static_cast<uint16_t>(bits >> 16));
    if (c.dtype == Dtype::kBFloat16) {
      bits &= 0xffff0000u;
      std::memcpy(&value, &bits, 4);
    }
  }
  c.x8 = random() % 2;
  return c;
}

using Result = std::vector<std::vector<uint8_t>>;

// Rows first .. first + rows of the case.
Result run(const Case& c, const Kernels& kernels, int64_t first, int64_t rows, int64_t threads) {
  Problem p{};
  p.rows = rows;
  p.k = c.k;
  p.weights = static_cast<int>(c.kinds.size());
  p.activation = c.activation;
  p.y_dtype = c.y_dtype;
  const int64_t size = c.y_dtype == Dtype::kFloat32 ? 4 : 2;
  Result results;
  for (int i = 0; i < p.weights; ++i) {
    const void* bias = c.biases[i].empty() ? nullptr : c.biases[i].data();
    p.weight[i] = {c.kinds[i], c.packed[i].data(), c.outputs[i], bias, Dtype::kFloat32, nullptr};
    if (i == 0 || c.activation == Activation::kNone) results.emplace_back(rows * c.outputs[i] * size);
  }
  for (size_t i = 0; i < results.size(); ++i) p.weight[i].y = results[i].data();
  // Copies, so that memory ends with the last element.
  const std::vector<float> x(c.x.begin() + first * c.k, c.x.begin() + (first + rows) * c.k);
  const std::vector<uint16_t> x16(c.x16.begin() + first * c.k, c.x16.begin() + (first + rows) * c.k);
  const void* data = c.dtype == Dtype::kFloat32 ? static_cast<const void*>(x.data()) : x16.data();
  Input in{data, c.dtype, c.x8, {}};
  if (!c.norm.empty()) in.norm = {c.norm.data(), 1e-3f};
  if (!c.post_norm.empty()) p.post_norm = {c.post_norm.data(), 1e-3f};
  std::vector<uint8_t> residual;
  if (!c.residual.empty()) {
    const float* from = c.residual.data() + first * c.outputs[0];
    residual.resize(rows * c.outputs[0] * size);
    if (c.y_dtype == Dtype::kFloat32)
      std::memcpy(residual.data(), from, residual.size());
    else
      kernels.narrow(from, rows * c.outputs[0], reinterpret_cast<uint16_t*>(residual.data()));
    p.residual = residual.data();
  }
  Threads pool;
  compute(pool, kernels, in, threads, &p);
  if (c.activation == Activation::kNone && c.post_norm.empty() && c.residual.empty()) {
    std::vector<uint8_t> largest(rows * sizeof(int32_t));
    Problem q = p;
    q.weights = 1;
    q.weight[0].y = nullptr;
    q.choices = 1 + c.outputs[0] / 2;
    compute_argmax(pool, kernels, in, threads, &q, reinterpret_cast<int32_t*>(largest.data()));
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t chosen = reinterpret_cast<const int32_t*>(largest.data())[row];
      if (chosen < 0 || chosen >= q.choices) std::abort();
    }
  }
  return results;
}

double value_at(const std::vector<uint8_t>& bytes, Dtype dtype, int64_t i) {
  float value;
  uint32_t bits = 0;
  if (dtype == Dtype::kFloat32) {
    std::memcpy(&value, &bytes[i * 4], 4);
    return value;
  }
  std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, &bytes[i * 2], 2);
  std::memcpy(&value, &bits, 4);
  return value;
}

void fail(const Case& c, const char* path, const char* what) {
  std::printf("%s on %s: rows %lld k %lld x8 %d activation %d x %d y %d;", what, path, (long long)c.rows, (long long)c.k,
              c.x8, (int)c.activation, (int)c.dtype, (int)c.y_dtype);
  for (size_t i = 0; i < c.kinds.size(); ++i) std::printf(" kind %d outputs %lld", (int)c.kinds[i], (long long)c.outputs[i]);
  std::printf("\n");
  std::exit(1);
}

void check(Random& random, const Case& c) {
  Path paths[kMaxPaths];
  const int count = available_paths(paths);
  // Where rounding to 8 bits falls on a tie, the last bit of the norm decides.
  const double tolerance = c.x8 && !c.norm.empty() ? 3e-2 : c.y_dtype == Dtype::kFloat32 ? 1e-4 : 1e-2;
  Result want;
  for (int path = 0; path < count; ++path) {
    const Kernels& kernels = *paths[path].linear;
    const char* const name = paths[path].name;
    const Result got = run(c, kernels, 0, c.rows, between(random, 1, 3));
    const int64_t row = between(random, 0, c.rows - 1), rows = between(random, 1, std::min<int64_t>(c.rows - row, 9));
    const Result part = run(c, kernels, row, rows, 1);
    for (size_t i = 0; i < got.size(); ++i) {
      const int64_t row_bytes = static_cast<int64_t>(got[i].size()) / c.rows;
      if (std::memcmp(part[i].data(), got[i].data() + row * row_bytes, part[i].size()) != 0)
        fail(c, name, "a row depends on its batch");
    }
    if (path == 0) want = got;
    for (size_t i = 0; i < got.size(); ++i) {
      const int64_t values = c.rows * c.outputs[i];
      double scale = 1e-6;
      for (int64_t at = 0; at < values; ++at) scale = std::max(scale, std::fabs(value_at(want[i], c.y_dtype, at)));
      for (int64_t at = 0; at < values; ++at) {
        const double off = value_at(got[i], c.y_dtype, at) - value_at(want[i], c.y_dtype, at);
        if (!(std::fabs(off) <= scale * tolerance))
          fail(c, name, "differs from portable");
      }
    }
    for (size_t i = 0; i < c.kinds.size(); ++i) {
      std::vector<float> embedding(c.k);
      const int64_t id = between(random, 0, c.outputs[i] - 1);
      const uint8_t* tile = c.packed[i].data() + id / kLanes * tile_bytes(c.kinds[i], c.k);
      kernels.row(c.kinds[i], tile, static_cast<int>(id % kLanes), c.k, embedding.data());
    }
  }
}

}  // namespace
}  // namespace noria

void noria::fuzz_linear(Random& random, int rounds) {
  for (int i = 0; i < rounds; ++i) check(random, draw(random));
}
