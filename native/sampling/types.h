// What the choice of tokens works on. ops/sampling/api.py says what is chosen.
#pragma once

#include "runtime/types.h"

namespace noria::sampling {

constexpr int32_t kNotANumber = -1, kNothingAllowed = -3;  // in place of a token, as in ops/sampling/types.py

// One row: how its token is chosen from its logits.
struct Row {
  const float* logits;  // [vocab]
  int64_t vocab;
  const int32_t* banned;  // [num_banned]; those outside the vocabulary mean nothing
  int64_t num_banned;
  float temperature;  // 0: the largest logit
  float top_p, min_p;
  int32_t top_k;  // 0: all
  uint32_t key_high, key_low, position;
};

// What is said of a token: see Score in ops/sampling/api.py. Floats travel as their bits.
struct Score {
  int32_t rank;
  float logit, sum;
};

// The same functions compiled for one set of processor instructions each.
struct Kernels {
  int32_t (*choose)(const Row& row);
  // Fills ids and values [num_top]. A token outside the vocabulary stands for the first one.
  Score (*score)(const float* logits, int64_t vocab, int32_t token, int64_t num_top, int32_t* ids, float* values);
};

}  // namespace noria::sampling
