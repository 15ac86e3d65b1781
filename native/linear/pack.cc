// Repacks matrices into tiles: from rows of floats, or from rows of ggml blocks without touching a code or a scale.
//
// The C structs of ggml's blocks (ggml-common.h), all little-endian:
//   q4_0  d: half, qs: 16 bytes               q4_1  d, m: half, qs: 16 bytes
//   q5_0  d: half, qh: 4 bytes, qs: 16 bytes  q5_1  d, m: half, qh: 4 bytes, qs: 16 bytes
//   q8_0  d: half, qs: 32 signed bytes
//   q4_K  d, dmin: half, scales: 12 bytes, qs: 128 bytes
//   q5_K  d, dmin: half, scales: 12 bytes, qh: 32 bytes, qs: 128 bytes
//   q6_K  ql: 128 bytes, qh: 64 bytes, scales: 16 signed bytes, d: half
#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear/types.h"

namespace noria {
namespace {

// 32 codes of one lane into the words of its block; see formats.h.
void put_codes(const uint8_t* codes, int bits, int lane, uint8_t* body) {
  uint8_t* word = body + lane * 4;
  if (bits == 8) {
    for (int k = 0; k < 32; ++k) word[k / 4 * 64 + k % 4] = codes[k];
    return;
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      word[i * 64 + j] = static_cast<uint8_t>((codes[8 * i + j] & 15) | (codes[8 * i + 4 + j] & 15) << 4);
  if (bits == 5) {
    for (int j = 0; j < 4; ++j) {
      unsigned high = 0;
      for (int w = 0; w < 8; ++w) high |= (codes[4 * w + j] >> 4 & 1u) << w;
      word[256 + j] = static_cast<uint8_t>(high);
    }
  } else if (bits == 6) {
    for (int half = 0; half < 2; ++half)
      for (int j = 0; j < 4; ++j) {
        unsigned high = 0;
        for (int w = 0; w < 4; ++w) high |= (codes[16 * half + 4 * w + j] >> 4 & 3u) << 2 * w;
        word[256 + half * 64 + j] = static_cast<uint8_t>(high);
      }
  }
}

void put_half(const uint8_t* source, int lane, uint8_t* row) { std::memcpy(row + lane * 2, source, 2); }

// Types with one scale for 32 elements.
void pack_simple(Kind kind, const uint8_t* source, int lane, uint8_t* block) {
  const bool minimum = kind == Kind::kQ4_1 || kind == Kind::kQ5_1;
  const bool five = kind == Kind::kQ5_0 || kind == Kind::kQ5_1;
  put_half(source, lane, block);
  if (minimum) put_half(source + 2, lane, block + 32);
  const uint8_t* rest = source + (minimum ? 4 : 2);
  uint8_t* body = block + (minimum ? 64 : 32);
  uint8_t codes[32];
  if (kind == Kind::kQ8_0) {
    for (int k = 0; k < 32; ++k) codes[k] = rest[k] ^ 0x80;  // signed to unsigned: + 128
    return put_codes(codes, 8, lane, body);
  }
  uint32_t high = 0;
  if (five) {
    std::memcpy(&high, rest, 4);
    rest += 4;
  }
  for (int k = 0; k < 16; ++k) {
    codes[k] = static_cast<uint8_t>((rest[k] & 15) | (high >> k & 1) << 4);
    codes[k + 16] = static_cast<uint8_t>(rest[k] >> 4 | (high >> (k + 16) & 1) << 4);
  }
  put_codes(codes, five ? 5 : 4, lane, body);
}

// q4_K and q5_K: 8 sub-blocks of 32, two of which share 32 bytes of nibbles; bit s of qh[k] belongs to sub-block s.
void pack_k45(Kind kind, const uint8_t* source, int lane, uint8_t* block) {
  put_half(source, lane, block);
  put_half(source + 2, lane, block + 32);
  const uint8_t* s = source + 4;
  for (int i = 0; i < 8; ++i) {
    const int scale = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
    const int min = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
    block[64 + i * 16 + lane] = static_cast<uint8_t>(scale);
    block[192 + i * 16 + lane] = static_cast<uint8_t>(min);
  }
  const bool five = kind == Kind::kQ5_K;
  const uint8_t *qh = source + 16, *qs = qh + (five ? 32 : 0);
  for (int i = 0; i < 8; ++i) {
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k) {
      const unsigned nibble = qs[i / 2 * 32 + k] >> (i % 2 * 4) & 15u;
      codes[k] = static_cast<uint8_t>(nibble | (five ? (qh[k] >> i & 1u) << 4 : 0u));
    }
    put_codes(codes, five ? 5 : 4, lane, block + 320 + i * (five ? 320 : 256));
  }
}

// q6_K: two halves of four groups of 32. The low nibbles of ql's 64 bytes belong to groups 0 and 1, the high ones to 2
// and 3; bits 2g and 2g + 1 of qh are the top of group g.
void pack_k6(const uint8_t* source, int lane, uint8_t* block) {
  put_half(source + 208, lane, block);
  for (int i = 0; i < 16; ++i) block[32 + i * 16 + lane] = source[192 + i];
  for (int i = 0; i < 8; ++i) {
    const int half = i / 4, group = i % 4;
    const uint8_t *ql = source + half * 64 + group % 2 * 32, *qh = source + 128 + half * 32;
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k)
      codes[k] = static_cast<uint8_t>((ql[k] >> (group / 2 * 4) & 15) | (qh[k] >> 2 * group & 3) << 4);
    put_codes(codes, 6, lane, block + 288 + i * 384);
  }
}

int64_t source_block_bytes(Kind kind) {
  switch (kind) {
    case Kind::kQ8_0: return 34;
    case Kind::kQ4_0: return 18;
    case Kind::kQ4_1: return 20;
    case Kind::kQ5_0: return 22;
    case Kind::kQ5_1: return 24;
    case Kind::kQ4_K: return 144;
    case Kind::kQ5_K: return 176;
    case Kind::kQ6_K: return 210;
    default: return 0;
  }
}

void pack_blocks(Kind kind, const uint8_t* source, int64_t k, int lane, uint8_t* tile) {
  const int64_t size = source_block_bytes(kind);
  const Shape shape = shape_of(kind);
  for (int64_t at = 0; at < k; at += shape.block, source += size, tile += shape.block_bytes) {
    if (kind == Kind::kQ6_K) {
      pack_k6(source, lane, tile);
    } else if (kind == Kind::kQ4_K || kind == Kind::kQ5_K) {
      pack_k45(kind, source, lane, tile);
    } else {
      pack_simple(kind, source, lane, tile);
    }
  }
}

// To signed bytes, the largest of the row +-127, with the scale in the tile's header.
void pack_int8(const float* source, int64_t k, int lane, uint8_t* tile) {
  float top = 0;
  for (int64_t i = 0; i < k; ++i) top = std::fabs(source[i]) > top ? std::fabs(source[i]) : top;
  const float scale = top / 127.0f, inverse = top > 0 ? 127.0f / top : 0.0f;
  std::memcpy(tile + lane * 4, &scale, 4);
  uint8_t* body = tile + shape_of(Kind::kInt8).tile_header;
  for (int64_t i = 0; i < ceil_div(k, 32) * 32; ++i) {
    const float value = i < k ? std::nearbyintf(source[i] * inverse) : 0.0f;
    // A NaN must not be converted: that is undefined. Nothing sensible can be made of such a row anyway.
    const int code = value >= -127.0f && value <= 127.0f ? static_cast<int>(value) : 0;
    body[i / 32 * 512 + i % 32 / 4 * 64 + lane * 4 + i % 4] = static_cast<uint8_t>(code + 128);
  }
}

template <typename T>
void pack_dense(const uint8_t* const (&rows)[kLanes], int64_t k, int64_t step, uint8_t* tile) {
  // step: neighbours along K that lie beside each other, 1 for float32 and 2 for bfloat16
  T* out = reinterpret_cast<T*>(tile);
  for (int64_t at = 0; at < k; at += 64)
    for (int lane = 0; lane < kLanes; ++lane) {
      if (rows[lane] == nullptr) continue;
      const T* source = reinterpret_cast<const T*>(rows[lane]);
      const int64_t end = at + 64 < k ? at + 64 : k;
      for (int64_t i = at; i < end; ++i) out[(i / step * kLanes + lane) * step + i % step] = source[i];
    }
}

}  // namespace
}  // namespace noria

using noria::Kind;

#pragma GCC visibility push(default)
extern "C" {

// Bytes of a packed matrix.
int64_t noria_packed_bytes(int32_t kind, int64_t outputs, int64_t k) {
  return noria::ceil_div(outputs, noria::kLanes) * noria::tile_bytes(static_cast<Kind>(kind), k);
}

// Tiles first_tile <= t < last_tile of a matrix [outputs, k] into packed, which begins at tile 0.
// source: rows of row_bytes bytes: of ggml blocks, of float32 for float32 and int8, of bfloat16 for bfloat16.
// order: output n is row order[n] of the source; null for row n.
void noria_pack(int32_t kind_number, const uint8_t* source, int64_t row_bytes, const int32_t* order, int64_t outputs,
                int64_t k, int64_t first_tile, int64_t last_tile, uint8_t* packed) {
  const auto kind = static_cast<Kind>(kind_number);
  const int64_t bytes = noria::tile_bytes(kind, k);
  for (int64_t t = first_tile; t < last_tile; ++t) {
    uint8_t* tile = packed + t * bytes;
    std::memset(tile, 0, bytes);
    const uint8_t* rows[noria::kLanes] = {};
    for (int lane = 0; lane < noria::kLanes && t * noria::kLanes + lane < outputs; ++lane) {
      const int64_t n = t * noria::kLanes + lane;
      rows[lane] = source + (order ? order[n] : n) * row_bytes;
    }
    if (kind == Kind::kFloat32) {
      noria::pack_dense<uint32_t>(rows, k, 1, tile);
    } else if (kind == Kind::kBFloat16) {
      noria::pack_dense<uint16_t>(rows, k, 2, tile);
    } else {
      for (int lane = 0; lane < noria::kLanes; ++lane) {
        if (rows[lane] == nullptr) continue;
        if (kind == Kind::kInt8) {
          noria::pack_int8(reinterpret_cast<const float*>(rows[lane]), k, lane, tile);
        } else {
          noria::pack_blocks(kind, rows[lane], k, lane, tile);
        }
      }
    }
  }
}

}  // extern "C"
#pragma GCC visibility pop
